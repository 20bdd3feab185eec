#include "common.h"

// The instruction set that these passes were built for.
const char *isa(void) { return ISA; }
