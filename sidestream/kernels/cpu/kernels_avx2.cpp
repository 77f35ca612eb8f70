#include "vec_avx2.h"

#include "kernels_impl.h"

#include "integer_impl.h"
#include "limits_impl.h"

namespace sidestream {

const Kernels& kernels_avx2() {
    static const Kernels kernels = with_limits(table("avx2"));
    return kernels;
}

}  // namespace sidestream
