#include "vec_avx512.h"

#include "kernels_impl.h"

#include "integer_impl.h"

namespace sidestream {

const Kernels& kernels_avx512() {
    static const Kernels kernels = table("avx512");
    return kernels;
}

}  // namespace sidestream
