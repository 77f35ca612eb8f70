#include "vec_portable.h"

#include "kernels_impl.h"

#include "integer_impl.h"
#include "limits_impl.h"

namespace sidestream {

const Kernels& kernels_portable() {
    static const Kernels kernels = with_limits(table("portable"));
    return kernels;
}

}  // namespace sidestream
