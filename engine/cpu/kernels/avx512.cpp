// The same functions for CPUs that multiply bfloat16: see columns.h.
#define NAME "_kernels_avx512"
#define INIT PyInit__kernels_avx512
#include "module.cpp"
