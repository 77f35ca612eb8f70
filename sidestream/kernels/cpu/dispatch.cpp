#include "dispatch.h"

#if defined(__x86_64__)
#include <cpuid.h>
#endif
#if defined(__x86_64__) && defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace sidestream {

#if defined(__x86_64__)
namespace {

// The matrix unit is there, and the system lets this process use it (its registers are large; Linux wants to be asked).
bool matrix_unit() {
#if defined(__linux__)
    unsigned eax, ebx, ecx, edx;
    if (!__get_cpuid_count(7, 0, &eax, &ebx, &ecx, &edx)) return false;
    constexpr unsigned BF16 = 1u << 22, TILE = 1u << 24, INT8 = 1u << 25;
    constexpr long REQUEST_PERMISSION = 0x1023, TILE_DATA = 18;
    return (edx & BF16) && (edx & TILE) && (edx & INT8) && syscall(SYS_arch_prctl, REQUEST_PERMISSION, TILE_DATA) == 0;
#else
    return false;
#endif
}

}  // namespace
#endif

std::vector<const Kernels*> supported_kernels() {
    std::vector<const Kernels*> found;
#if defined(__x86_64__)
    __builtin_cpu_init();
    const bool avx512 = __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") && __builtin_cpu_supports("avx512vl") &&
                        __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512cd");
    if (avx512 && __builtin_cpu_supports("avx512bf16") && __builtin_cpu_supports("avx512vnni") && __builtin_cpu_supports("avx512vbmi")) {
        static const bool amx = matrix_unit();
        if (amx) found.push_back(&kernels_amx());
        found.push_back(&kernels_avx512());
    }
    if (__builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c") && __builtin_cpu_supports("bmi2"))
        found.push_back(&kernels_avx2());
#endif
    found.push_back(&kernels_portable());
    return found;
}

}  // namespace sidestream
