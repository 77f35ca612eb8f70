// Which instruction sets this processor has, best first.
#pragma once

#include <string>
#include <vector>

#include "common.h"

namespace sidestream {

std::vector<const Kernels*> supported_kernels();

}  // namespace sidestream
