/* A library that makes system calls fail that change files below a directory. Another process controls it by a
 * small shared file.
 *
 * It is preloaded into a process (LD_PRELOAD). DISK_FAULTS names the shared file, DISK_FAULTS_BELOW the directory.
 * It applies two rules, one after the other. Each rule lets some calls of its classes pass, then makes the next ones fail.
 * A failed sync syncs nothing. Written data stays in the page cache, as on ext4 and XFS.
 */
#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <pthread.h>
#include <stdarg.h>
#include <stdint.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/mman.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <unistd.h>

enum { WRITES = 1, SYNCS = 2, NAMES = 4 };

/* `skip` calls pass, then `times` calls fail (-1: all) with `error` (0: a write is short). */
struct rule {
    int32_t classes, skip, times, error;
};

/* The controlling process writes the rules while `armed` is 0. `failed`, `examined`: counts of calls. */
struct shared {
    int32_t armed, failed, examined, unused;
    struct rule rules[2];
};

static struct shared *shared;
static const char *below;
static pthread_mutex_t lock = PTHREAD_MUTEX_INITIALIZER;

__attribute__((constructor)) static void map_shared_file(void)
{
    const char *path = getenv("DISK_FAULTS");
    below = getenv("DISK_FAULTS_BELOW");
    int file = path && below ? open(path, O_RDWR | O_CLOEXEC) : -1;
    if (file < 0)
        return;
    void *mapped = mmap(NULL, sizeof *shared, PROT_READ | PROT_WRITE, MAP_SHARED, file, 0);
    close(file);
    shared = mapped == MAP_FAILED ? NULL : mapped;
}

static int is_below(int file)
{
    char link[32], path[4096];
    snprintf(link, sizeof link, "/proc/self/fd/%d", file);
    ssize_t size = readlink(link, path, sizeof path - 1);
    size_t length = strlen(below);
    if (size < (ssize_t)length || strncmp(path, below, length))
        return 0;
    path[size] = 0;
    return path[length] == 0 || path[length] == '/';
}

/* Returns the error with which a call of this class must fail. 0: it must write less; -1: it must be passed on. */
static int next_fault(int class, int file)
{
    int code = -1;
    if (!shared || !__atomic_load_n(&shared->armed, __ATOMIC_ACQUIRE) || !is_below(file))
        return code;
    pthread_mutex_lock(&lock);
    shared->examined++;
    struct rule *rule = &shared->rules[shared->rules[0].times ? 0 : 1];
    if (rule->times && rule->classes & class) {
        if (rule->skip > 0) {
            rule->skip--;
        } else if (rule->error || class == WRITES) {
            rule->times -= rule->times > 0;
            shared->failed++;
            code = rule->error;
        }
    }
    pthread_mutex_unlock(&lock);
    return code;
}

#define REAL(name) \
    static __typeof__(name) *real; \
    if (!real) \
        real = (__typeof__(name) *)dlsym(RTLD_NEXT, #name)

#define FAIL(class, file) \
    do { \
        int code = next_fault(class, file); \
        if (code > 0) { \
            errno = code; \
            return -1; \
        } \
    } while (0)

#define WRITE_AT(name, offset) \
    ssize_t name(int file, const void *data, size_t size, offset at) \
    { \
        REAL(name); \
        int code = next_fault(WRITES, file); \
        if (code > 0) { \
            errno = code; \
            return -1; \
        } \
        return real(file, data, code == 0 && size > 1 ? size / 2 : size, at); \
    }

/* A short write writes half of the first buffer. */
#define WRITE_PARTS_AT(name, parameters, ...) \
    ssize_t name(int file, const struct iovec *parts, int count, parameters) \
    { \
        REAL(name); \
        int code = next_fault(WRITES, file); \
        if (code > 0) { \
            errno = code; \
            return -1; \
        } \
        if (code == 0 && count > 0 && parts[0].iov_len > 1) { \
            struct iovec half = {parts[0].iov_base, parts[0].iov_len / 2}; \
            return real(file, &half, 1, __VA_ARGS__); \
        } \
        return real(file, parts, count, __VA_ARGS__); \
    }

#define AND ,

WRITE_AT(pwrite, off_t)
WRITE_AT(pwrite64, off64_t)
WRITE_PARTS_AT(pwritev, off_t at, at)
WRITE_PARTS_AT(pwritev64, off64_t at, at)
WRITE_PARTS_AT(pwritev2, off_t at AND int flags, at, flags)
WRITE_PARTS_AT(pwritev64v2, off64_t at AND int flags, at, flags)

ssize_t write(int file, const void *data, size_t size)
{
    REAL(write);
    FAIL(WRITES, file);
    return real(file, data, size);
}

int fsync(int file)
{
    REAL(fsync);
    FAIL(SYNCS, file);
    return real(file);
}

int fdatasync(int file)
{
    REAL(fdatasync);
    FAIL(SYNCS, file);
    return real(file);
}

int ftruncate(int file, off_t size)
{
    REAL(ftruncate);
    FAIL(WRITES, file);
    return real(file, size);
}

int ftruncate64(int file, off64_t size)
{
    REAL(ftruncate64);
    FAIL(WRITES, file);
    return real(file, size);
}

#define ALLOCATE(name, offset) \
    int name(int file, offset at, offset size) \
    { \
        REAL(name); \
        int code = next_fault(WRITES, file); \
        return code > 0 ? code : real(file, at, size); \
    }

ALLOCATE(posix_fallocate, off_t)
ALLOCATE(posix_fallocate64, off64_t)

int renameat(int old_directory, const char *old, int new_directory, const char *new)
{
    REAL(renameat);
    FAIL(NAMES, old_directory);
    return real(old_directory, old, new_directory, new);
}

int unlinkat(int directory, const char *name, int flags)
{
    REAL(unlinkat);
    FAIL(NAMES, directory);
    return real(directory, name, flags);
}

#define OPEN_AT(name) \
    int name(int directory, const char *path, int flags, ...) \
    { \
        REAL(name); \
        va_list more; \
        va_start(more, flags); \
        int creates = flags & O_CREAT || (flags & O_TMPFILE) == O_TMPFILE; \
        mode_t mode = creates ? va_arg(more, mode_t) : 0; \
        va_end(more); \
        if (flags & O_CREAT) \
            FAIL(NAMES, directory); \
        return real(directory, path, flags, mode); \
    }

OPEN_AT(openat)
OPEN_AT(openat64)
