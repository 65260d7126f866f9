// MLX's own defines bfloat functions by address space; here they are the library's.
#pragma once
