// The few functions of the C library that the machine uses, which every process has.
#pragma once

extern "C" {
void* malloc(size_t);
void* calloc(size_t, size_t);
void* realloc(void*, size_t);
void qsort(void*, size_t, size_t, int (*)(const void*, const void*));
void free(void*);
void* memcpy(void*, const void*, size_t);
void* memmove(void*, const void*, size_t);
void* memset(void*, int, size_t);
int strcmp(const char*, const char*);
char* strrchr(const char*, int);
int snprintf(char*, size_t, const char*, ...);
int vsnprintf(char*, size_t, const char*, __builtin_va_list);

struct Image { // Dl_info
  const char* path;
  void* base;
  const char* symbol;
  void* address;
};
int dladdr(const void*, Image*);
}
