#include "vec_avx512.h"

#include "kernels_impl.h"

#include "integer_impl.h"
#include "limits_impl.h"

namespace sidestream {

const Kernels& kernels_amx() {
    static const Kernels kernels = with_limits(table("amx"));
    return kernels;
}

}  // namespace sidestream
