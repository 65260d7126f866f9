// The machine that runs a kernel's threads; linked to each kernel.
#include "state.h"

namespace machine {
Machine m;
}

#include "launch.h"
#include "rounding.h"
// After everything that it calls, and before nothing.
#include "checks.h"
