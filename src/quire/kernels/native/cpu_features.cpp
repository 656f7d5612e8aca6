// Detects the features of this CPU and operating system, before any kernel is loaded. Compiled for the baseline of the
// architecture.
#include <cstdint>
#include <string>

#if defined(__x86_64__)
#include <cpuid.h>
#elif defined(__aarch64__) && defined(__APPLE__)
#include <sys/sysctl.h>
#endif
#if defined(__linux__)
#include <sys/auxv.h>
#include <sys/syscall.h>
#include <unistd.h>
#endif

namespace {

#if defined(__x86_64__)
struct Registers {
    unsigned eax = 0, ebx = 0, ecx = 0, edx = 0;
};

// Run CPUID for a leaf and subleaf; zeros if it is not supported.
Registers ask(unsigned leaf, unsigned part) {
    Registers found;
    if (!__get_cpuid_count(leaf, part, &found.eax, &found.ebx, &found.ecx, &found.edx)) return {};
    return found;
}

// XCR0: the register state that the operating system saves on a context switch.
uint64_t saved_registers() {
    unsigned low, high;
    asm volatile("xgetbv" : "=a"(low), "=d"(high) : "c"(0));
    return static_cast<uint64_t>(high) << 32 | low;
}

// Ask Linux for permission to use AMX tile data.
bool request_tiles() {
#if defined(__linux__)
    constexpr int ARCH_REQ_XCOMP_PERM = 0x1023, XFEATURE_XTILEDATA = 18;
    return syscall(SYS_arch_prctl, ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA) == 0;
#else
    return false;
#endif
}

// Return the feature names of this CPU, each followed by a space.
std::string find_features() {
    std::string found;
    const auto add = [&](unsigned word, int bit, const char* name) {
        if (word >> bit & 1) found += std::string(name) + " ";
    };
    constexpr uint64_t AVX = 0x6, AVX512 = 0xE6, TILES = 0x60000;
    const Registers first = ask(1, 0), more = ask(7, 0), last = more.eax >= 1 ? ask(7, 1) : Registers{};
    if (!(first.ecx >> 27 & 1)) return found;  // xgetbv
    const uint64_t saved = saved_registers();
    if ((saved & AVX) != AVX) return found;
    add(first.ecx, 12, "fma"), add(first.ecx, 29, "f16c");
    add(more.ebx, 3, "bmi1"), add(more.ebx, 5, "avx2"), add(more.ebx, 8, "bmi2");
    if ((saved & AVX512) != AVX512) return found;
    add(more.ebx, 16, "avx512f"), add(more.ebx, 17, "avx512dq"), add(more.ebx, 28, "avx512cd");
    add(more.ebx, 30, "avx512bw"), add(more.ebx, 31, "avx512vl");
    add(more.ecx, 11, "avx512_vnni"), add(last.eax, 5, "avx512_bf16");
    if ((saved & TILES) != TILES || !(more.edx >> 24 & 1) || !request_tiles()) return found;
    add(more.edx, 22, "amx_bf16"), add(more.edx, 24, "amx_tile"), add(more.edx, 25, "amx_int8");
    return found;
}
#elif defined(__aarch64__) && defined(__linux__)
// Return the feature names of this CPU, each followed by a space.
std::string find_features() {
    std::string found;
    const auto add = [&](int source, int bit, const char* name) {
        if (getauxval(source) >> bit & 1) found += std::string(name) + " ";
    };
    add(AT_HWCAP, 7, "crc32"), add(AT_HWCAP, 8, "atomics"), add(AT_HWCAP, 12, "asimdrdm");
    add(AT_HWCAP, 20, "asimddp"), add(AT_HWCAP2, 13, "i8mm"), add(AT_HWCAP2, 14, "bf16");
    return found;
}
#elif defined(__aarch64__) && defined(__APPLE__)
// Return the feature names of this CPU, each followed by a space.
std::string find_features() {
    std::string found = "crc32 atomics asimdrdm ";  // all Apple CPUs have these
    const auto add = [&](const char* question, const char* name) {
        int yes = 0;
        size_t size = sizeof yes;
        if (sysctlbyname(question, &yes, &size, nullptr, 0) == 0 && yes) found += std::string(name) + " ";
    };
    add("hw.optional.arm.FEAT_DotProd", "asimddp"), add("hw.optional.arm.FEAT_I8MM", "i8mm");
    add("hw.optional.arm.FEAT_BF16", "bf16");
    return found;
}
#else
std::string find_features() { return ""; }
#endif

}  // namespace

extern "C" {

// The feature names, each followed by a space, that `needs` in paths.py may list.
const char* quire_cpu_features() {
    static const std::string found = find_features();
    return found.c_str();
}
}
