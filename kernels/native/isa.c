#include "common.h"

// What these passes were built for.
const char *isa(void) { return ISA; }
