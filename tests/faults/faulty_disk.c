/* A disk that fails or is slow, for one process and its children: gcc -shared -fPIC -o disk.so disk.c -ldl

   LD_PRELOAD=disk.so DISK_FAULTS="step-00000004 write,fsync 28 0 -1;metrics.jsonl write 28 0 3" program

   A rule: a part of a path; operations (open: for writing; read, write, fsync, rename, mkdir, unlink); the number of an
   error, or 0; milliseconds to wait; how often in each process, or -1: always. */

#define _GNU_SOURCE
#include <dlfcn.h>
#include <errno.h>
#include <fcntl.h>
#include <stdarg.h>
#include <stdio.h>
#include <stdlib.h>
#include <string.h>
#include <sys/stat.h>
#include <sys/types.h>
#include <sys/uio.h>
#include <time.h>
#include <unistd.h>

struct rule {
    char part[256], operations[128];
    int error, delay_ms, count;
};

static struct rule rules[16];
static int known = -1;

static void read_rules(void) {
    char text[4096];
    const char *given = getenv("DISK_FAULTS");
    known = 0;
    snprintf(text, sizeof text, "%s", given ? given : "");
    char *rest = text, *one;
    while (known < 16 && (one = strsep(&rest, ";"))) {
        struct rule *rule = &rules[known];
        if (sscanf(one, "%255s %127s %d %d %d", rule->part, rule->operations, &rule->error, &rule->delay_ms,
                   &rule->count) == 5)
            known++;
    }
}

/* The error that an operation meets on a path, or 0. */
static int met(const char *path, const char *operation) {
    if (known < 0) read_rules();
    for (int i = 0; path && i < known; i++) {
        struct rule *rule = &rules[i];
        if (!rule->count || !strstr(path, rule->part) || !strstr(rule->operations, operation)) continue;
        if (rule->count > 0) rule->count--;
        if (rule->delay_ms) {
            struct timespec wait = {rule->delay_ms / 1000, rule->delay_ms % 1000 * 1000000L};
            nanosleep(&wait, NULL);
        }
        if (rule->error) return rule->error;
    }
    return 0;
}

static int met_by(int file, const char *operation) {
    char link[64], path[4096];
    int wanted = 0;
    if (known < 0) read_rules();
    for (int i = 0; i < known; i++) wanted |= rules[i].count && strstr(rules[i].operations, operation);
    if (!wanted) return 0;
    snprintf(link, sizeof link, "/proc/self/fd/%d", file);
    ssize_t length = readlink(link, path, sizeof path - 1);
    if (length < 0) return 0;
    path[length] = 0;
    return met(path, operation);
}

#define FAIL_IF(found)        \
    do {                      \
        int error = (found);  \
        if (error) {          \
            errno = error;    \
            return -1;        \
        }                     \
    } while (0)
#define NEXT(name) (__typeof__(&name)) dlsym(RTLD_NEXT, #name)
#define WRITES(flags) ((flags) & (O_WRONLY | O_RDWR))

#define OPEN(name)                                                  \
    int name(const char *path, int flags, ...) {                    \
        va_list more;                                               \
        va_start(more, flags);                                      \
        mode_t mode = va_arg(more, int);                            \
        va_end(more);                                               \
        if (WRITES(flags)) FAIL_IF(met(path, "open"));              \
        return (NEXT(name))(path, flags, mode);                     \
    }
OPEN(open)
OPEN(open64)

ssize_t write(int file, const void *bytes, size_t count) {
    FAIL_IF(met_by(file, "write"));
    return (NEXT(write))(file, bytes, count);
}
ssize_t read(int file, void *bytes, size_t count) {
    FAIL_IF(met_by(file, "read"));
    return (NEXT(read))(file, bytes, count);
}
int fsync(int file) {
    FAIL_IF(met_by(file, "fsync"));
    return (NEXT(fsync))(file);
}
int rename(const char *from, const char *to) {
    FAIL_IF(met(from, "rename"));
    return (NEXT(rename))(from, to);
}
int mkdir(const char *path, mode_t mode) {
    FAIL_IF(met(path, "mkdir"));
    return (NEXT(mkdir))(path, mode);
}
int unlink(const char *path) {
    FAIL_IF(met(path, "unlink"));
    return (NEXT(unlink))(path);
}
