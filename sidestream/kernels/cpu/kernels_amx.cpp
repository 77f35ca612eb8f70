#include "vec_avx512.h"

#include "kernels_impl.h"

#include "integer_impl.h"

namespace sidestream {

const Kernels& kernels_amx() {
    static const Kernels kernels = table("amx");
    return kernels;
}

}  // namespace sidestream
