// The same functions for CPUs that multiply bfloat16: see panel_types.h.
#define NAME "_kernels_avx512"
#define INIT PyInit__kernels_avx512
#include "module.cpp"
