// What is precompiled. Its folder has no metal.h: that of the options is taken, with what they say of it.
#include "metal.h"
