#include <cstring>
#include <string>

#include "core.h"

#if defined(__x86_64__) && defined(__linux__)
#include <sys/syscall.h>
#include <unistd.h>
#endif
#if defined(__aarch64__) && defined(__linux__)
#include <sys/auxv.h>
#ifndef HWCAP_ASIMDDP
#define HWCAP_ASIMDDP (1 << 20)
#endif
#ifndef HWCAP2_I8MM
#define HWCAP2_I8MM (1 << 13)
#endif
#endif
#if defined(__aarch64__) && defined(__APPLE__)
#include <sys/sysctl.h>
#endif

namespace qcore_cpu {
namespace {

struct Candidate {
  const Kernels* kernels;
  bool present;
};

#if defined(__x86_64__)
// By CPUID and XGETBV, which the compiler's library reads: an instruction set counts if the system saves its registers.
bool has_avx2() { return __builtin_cpu_supports("avx2") && __builtin_cpu_supports("fma") && __builtin_cpu_supports("f16c"); }
bool has_avx512vnni() {
  return has_avx2() && __builtin_cpu_supports("avx512f") && __builtin_cpu_supports("avx512bw") &&
         __builtin_cpu_supports("avx512vl") && __builtin_cpu_supports("avx512dq") && __builtin_cpu_supports("avx512cd") &&
         __builtin_cpu_supports("avx512vnni");
}
bool has_avxvnni() {
  unsigned a = 7, b, c = 1, d;
  __asm__("cpuid" : "+a"(a), "=b"(b), "+c"(c), "=d"(d));
  return has_avx2() && (a >> 4 & 1);
}
// AMX: the processor has its int8 and bf16 tiles, and the system grants their registers to this process when asked.
bool has_amx() {
#if defined(QCORE_AMX_EMULATED)
  return has_avx512vnni();
#elif defined(__linux__)
  unsigned a = 7, b, c = 0, d;
  __asm__("cpuid" : "+a"(a), "=b"(b), "+c"(c), "=d"(d));
  if (!has_avx512vnni() || !__builtin_cpu_supports("avx512bf16") || (d >> 24 & 3) != 3 || !(d >> 22 & 1)) return false;
  constexpr long ASK = 0x1023, TILES = 18;  // ARCH_REQ_XCOMP_PERM, XFEATURE_XTILEDATA
  return syscall(SYS_arch_prctl, ASK, TILES) == 0;
#else
  return false;
#endif
}
// vdpbf16ps pays on AMD only: on Intel (Sapphire Rapids) it has a quarter of the rate of int8 products.
bool has_fast_bf16() { return has_avx512vnni() && __builtin_cpu_supports("avx512bf16") && !__builtin_cpu_is("intel"); }
const Candidate* candidates(int& count) {
  static const Candidate list[] = {
      {amxint8_kernels(), has_amx()},
      {avx512bf16_kernels(), has_fast_bf16()},
      {avx512vnni_kernels(), has_avx512vnni()},
      {avxvnni_kernels(), has_avxvnni()},
      {avx2_kernels(), has_avx2()},
      {generic_kernels(), true},
  };
  count = 6;
  return list;
}
#elif defined(__aarch64__)
bool has_dotprod() {
#if defined(__linux__)
  return getauxval(AT_HWCAP) & HWCAP_ASIMDDP;
#else
  return true;  // every Apple processor with arm64 that runs macOS 11 or newer
#endif
}
bool has_i8mm() {  // and dotprod, which Armv8.4 demands of every processor with it
#if defined(__linux__)
  return has_dotprod() && getauxval(AT_HWCAP2) & HWCAP2_I8MM;
#elif defined(__APPLE__)
  int present = 0;
  size_t size = sizeof present;
  return !sysctlbyname("hw.optional.arm.FEAT_I8MM", &present, &size, nullptr, 0) && present;
#else
  return false;
#endif
}
const Candidate* candidates(int& count) {
  static const Candidate list[] = {{neoni8mm_kernels(), has_i8mm()},
                                   {neondot_kernels(), has_dotprod()},
                                   {neon_kernels(), true},
                                   {generic_kernels(), true}};
  count = 4;
  return list;
}
#else
const Candidate* candidates(int& count) {
  static const Candidate list[] = {{generic_kernels(), true}};
  count = 1;
  return list;
}
#endif

}  // namespace

const Kernels* kernels_for(const char* name) {
  int count;
  const Candidate* list = candidates(count);
  for (int i = 0; i < count; i++) {
    if (list[i].present && (!name || !*name || !std::strcmp(name, list[i].kernels->name))) return list[i].kernels;
  }
  return nullptr;
}

const char* kernel_names() {
  static const std::string names = [] {
    int count;
    const Candidate* list = candidates(count);
    std::string all;
    for (int i = 0; i < count; i++) {
      if (list[i].present) all += (all.empty() ? "" : " ") + std::string(list[i].kernels->name);
    }
    return all;
  }();
  return names.c_str();
}

}  // namespace qcore_cpu
