/* Preloaded into a process (LD_PRELOAD): logs what becomes of its files, C++ included, for a model of a power cut.

   $SHIM_LOG    file that gets a line for each operation: its letter, a tab, and one or two paths, each ended by NUL
                W path    opened for writing       S path       fsync or fdatasync
                R old new renamed                  U path       unlinked or removed
   $SHIM_ROOT   only paths that begin with this are logged
   $SHIM_KILL   number of the operation before which the process is killed; 0 or absent: none
   $SHIM_FAIL   number of the operation that fails with EIO; 0 or absent: none
   $SHIM_FORGET number of the operation which, if it is a flush, is reported as done, and is not */

#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <limits.h>
#include <pthread.h>
#include <signal.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <unistd.h>

static pthread_mutex_t mutex = PTHREAD_MUTEX_INITIALIZER;
static long count = 0;

#define NEXT(name) ((__typeof__(&name))dlsym(RTLD_NEXT, #name))

/* The path that a descriptor of a folder and a path in it name, or that a descriptor alone names. */
static void locate(int folder, const char *path, char *out) {
    char link[64], base[PATH_MAX / 2];
    if (path && path[0] == '/' && strncmp(path, "/proc/self/fd/", 14)) {
        snprintf(out, PATH_MAX, "%s", path);
        return;
    }
    if (path && path[0] == '/') { /* through a descriptor */
        folder = atoi(path + 14);
        path = strchr(path + 14, '/');
        path = path ? path + 1 : NULL;
    }
    if (folder == AT_FDCWD)
        snprintf(link, sizeof link, "/proc/self/cwd");
    else
        snprintf(link, sizeof link, "/proc/self/fd/%d", folder);
    ssize_t length = readlink(link, base, sizeof base - 1);
    base[length > 0 ? length : 0] = 0;
    if (path)
        snprintf(out, PATH_MAX, "%s/%s", base, path);
    else
        snprintf(out, PATH_MAX, "%s", base);
}

static int is(long number, const char *variable) {
    const char *value = getenv(variable);
    return value && number == atol(value);
}

enum outcome { DONE, FAILS, FORGOTTEN };

/* Log an operation; return whether it must fail, or is to be forgotten. */
static enum outcome note(char kind, const char *one, const char *two) {
    const char *root = getenv("SHIM_ROOT"), *log = getenv("SHIM_LOG");
    if (!root || !log || (strncmp(one, root, strlen(root)) && (!two || strncmp(two, root, strlen(root))))) return DONE;
    pthread_mutex_lock(&mutex);
    count++;
    if (is(count, "SHIM_KILL")) kill(getpid(), SIGKILL);
    if (is(count, "SHIM_FAIL")) {
        pthread_mutex_unlock(&mutex);
        errno = EIO;
        return FAILS;
    }
    if (kind == 'S' && is(count, "SHIM_FORGET")) {
        pthread_mutex_unlock(&mutex);
        return FORGOTTEN;
    }
    int file = NEXT(open)(log, O_WRONLY | O_APPEND | O_CREAT | O_CLOEXEC, 0644);
    if (file >= 0) {
        char line[2 * PATH_MAX + 8];
        int length = snprintf(line, sizeof line, "%c\t%s", kind, one) + 1;
        if (two) length += snprintf(line + length, sizeof line - length, "%s", two) + 1;
        line[length++] = '\n';
        if (write(file, line, length) != length) abort();
        NEXT(close)(file);
    }
    pthread_mutex_unlock(&mutex);
    return DONE;
}

static int writes(int flags) { return (flags & O_ACCMODE) != O_RDONLY; }

#define OPEN(name)                                                            \
    int name(const char *path, int flags, ...) {                              \
        va_list more;                                                         \
        va_start(more, flags);                                                \
        mode_t mode = flags & (O_CREAT | __O_TMPFILE) ? va_arg(more, mode_t) : 0; \
        va_end(more);                                                         \
        char at[PATH_MAX];                                                    \
        if (writes(flags) && (locate(AT_FDCWD, path, at), note('W', at, NULL))) return -1; \
        return NEXT(name)(path, flags, mode);                                 \
    }
#define OPENAT(name)                                                          \
    int name(int folder, const char *path, int flags, ...) {                  \
        va_list more;                                                         \
        va_start(more, flags);                                                \
        mode_t mode = flags & (O_CREAT | __O_TMPFILE) ? va_arg(more, mode_t) : 0; \
        va_end(more);                                                         \
        char at[PATH_MAX];                                                    \
        if (writes(flags) && (locate(folder, path, at), note('W', at, NULL))) return -1; \
        return NEXT(name)(folder, path, flags, mode);                         \
    }
#define FOPEN(name)                                                           \
    FILE *name(const char *path, const char *mode) {                          \
        char at[PATH_MAX];                                                    \
        if (strpbrk(mode, "wa+") && (locate(AT_FDCWD, path, at), note('W', at, NULL))) return NULL; \
        return NEXT(name)(path, mode);                                        \
    }
#define SYNC(name)                                                            \
    int name(int descriptor) {                                                \
        char at[PATH_MAX];                                                    \
        locate(descriptor, NULL, at);                                         \
        enum outcome outcome = note('S', at, NULL);                           \
        return outcome == FORGOTTEN ? 0 : outcome ? -1 : NEXT(name)(descriptor); \
    }

OPEN(open)
OPEN(open64)
OPENAT(openat)
OPENAT(openat64)
FOPEN(fopen)
FOPEN(fopen64)
SYNC(fsync)
SYNC(fdatasync)

int rename(const char *old, const char *new) {
    char one[PATH_MAX], two[PATH_MAX];
    locate(AT_FDCWD, old, one), locate(AT_FDCWD, new, two);
    if (note('R', one, two)) return -1;
    return NEXT(rename)(old, new);
}

int renameat(int from, const char *old, int to, const char *new) {
    char one[PATH_MAX], two[PATH_MAX];
    locate(from, old, one), locate(to, new, two);
    if (note('R', one, two)) return -1;
    return NEXT(renameat)(from, old, to, new);
}

int renameat2(int from, const char *old, int to, const char *new, unsigned flags) {
    char one[PATH_MAX], two[PATH_MAX];
    locate(from, old, one), locate(to, new, two);
    if (note('R', one, two)) return -1;
    return NEXT(renameat2)(from, old, to, new, flags);
}

int unlink(const char *path) {
    char at[PATH_MAX];
    locate(AT_FDCWD, path, at);
    if (note('U', at, NULL)) return -1;
    return NEXT(unlink)(path);
}

int unlinkat(int folder, const char *path, int flags) {
    char at[PATH_MAX];
    locate(folder, path, at);
    if (note('U', at, NULL)) return -1;
    return NEXT(unlinkat)(folder, path, flags);
}

int rmdir(const char *path) {
    char at[PATH_MAX];
    locate(AT_FDCWD, path, at);
    if (note('U', at, NULL)) return -1;
    return NEXT(rmdir)(path);
}
