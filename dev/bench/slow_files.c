/* A slow file system, imitated: LD_PRELOAD this, and what names a file below SLOW_FOLDER takes SLOW_MICROSECONDS longer.
 *
 *     cc -shared -fPIC -o slow_files.so dev/bench/slow_files.c -ldl
 *     LD_PRELOAD=$PWD/slow_files.so SLOW_FOLDER=$PWD/.venv/ SLOW_MICROSECONDS=1000 python -c 'import torch'
 *
 * Only absolute paths count. Reading is as fast as ever, and so is what the dynamic linker itself opens. */
#define _GNU_SOURCE
#include <dirent.h>
#include <dlfcn.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

static void wait_for(const char *path) {
    const char *folder = getenv("SLOW_FOLDER"), *delay = getenv("SLOW_MICROSECONDS");
    if (path && folder && delay && strncmp(path, folder, strlen(folder)) == 0) usleep(atoi(delay));
}

#define THE_REAL(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))
#define SLOW(type, name, parameters, path, ...) \
    type name parameters { wait_for(path); return THE_REAL(name)(__VA_ARGS__); }

SLOW(int, stat, (const char *restrict path, struct stat *restrict found), path, path, found)
SLOW(int, lstat, (const char *restrict path, struct stat *restrict found), path, path, found)
SLOW(int, fstatat, (int folder, const char *restrict path, struct stat *restrict found, int flags), path,
     folder, path, found, flags)
SLOW(int, stat64, (const char *restrict path, struct stat64 *restrict found), path, path, found)
SLOW(int, lstat64, (const char *restrict path, struct stat64 *restrict found), path, path, found)
SLOW(int, fstatat64, (int folder, const char *restrict path, struct stat64 *restrict found, int flags), path,
     folder, path, found, flags)
SLOW(int, access, (const char *path, int mode), path, path, mode)
SLOW(DIR *, opendir, (const char *path), path, path)
SLOW(ssize_t, readlink, (const char *restrict path, char *restrict text, size_t size), path, path, text, size)

#define SLOW_OPEN(name) \
    int name(const char *path, int flags, ...) { \
        va_list rest; \
        va_start(rest, flags); \
        mode_t mode = va_arg(rest, mode_t); /* only looked at when a file is made */ \
        va_end(rest); \
        wait_for(path); \
        return THE_REAL(name)(path, flags, mode); \
    }
SLOW_OPEN(open)
SLOW_OPEN(open64)
