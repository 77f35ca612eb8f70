#include "vec_portable.h"

#include "kernels_impl.h"

#include "integer_impl.h"

namespace sidestream {

const Kernels& kernels_portable() {
    static const Kernels kernels = table("portable");
    return kernels;
}

}  // namespace sidestream
