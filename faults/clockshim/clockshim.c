/*
 * The wall clock of a process that is preloaded with this, as a page in a file says: see Clock in clock.go.
 *
 * The real time is asked of the kernel itself, for to look the C library's function up allocates memory, and an allocator
 * that asks for the time while it starts then waits for itself. For the same reason nothing here allocates. There is
 * nothing to link with, so that one build runs under every C library: what is called is in any process that is preloaded.
 */
#define _GNU_SOURCE
#include <fcntl.h>
#include <stdatomic.h>
#include <stdint.h>
#include <stdlib.h>
#include <sys/mman.h>
#include <sys/syscall.h>
#include <sys/time.h>
#include <time.h>
#include <unistd.h>

_Static_assert(sizeof(time_t) == 8 && sizeof(long) == 8, "the kernel's timespec must be the C library's");

#define SECOND 1000000000LL
#define PUBLIC __attribute__((visibility("default")))

/* The law by which the clock runs, in nanoseconds: base + (now - since) * rate. It is in force while changes is even. */
struct page {
	_Atomic uint64_t changes;
	_Atomic int64_t since, base;
	_Atomic uint64_t rate; /* the bits of a double */
};

static struct page *_Atomic mapped;
static struct page real = {.rate = 0x3ff0000000000000}; /* a rate of 1 */

static void fail(const char *why, size_t len)
{
	syscall(SYS_write, 2, why, len);
	syscall(SYS_exit_group, 127);
}
#define FAIL(why) fail(why, sizeof why - 1)

/* A server that runs on the real clock without anybody's knowing would make every test with it a lie: it ends instead. */
static struct page *attach(void)
{
	struct page *p = atomic_load_explicit(&mapped, memory_order_acquire);
	if (p)
		return p;
	const char *path = getenv("FENCELAB_CLOCK");
	if (!path) {
		p = &real;
	} else {
		long fd = syscall(SYS_openat, AT_FDCWD, path, O_RDONLY | O_CLOEXEC);
		if (fd < 0)
			FAIL("fencelab: cannot open the clock that FENCELAB_CLOCK names\n");
		p = (struct page *)syscall(SYS_mmap, 0L, sizeof *p, (long)PROT_READ, (long)MAP_SHARED, fd, 0L);
		if (p == MAP_FAILED)
			FAIL("fencelab: cannot map the clock that FENCELAB_CLOCK names\n");
		syscall(SYS_close, fd);
	}
	atomic_store_explicit(&mapped, p, memory_order_release);
	return p;
}

__attribute__((constructor)) static void start(void) { attach(); }

/* now is read between the two looks at changes. So every read under the old law is of an earlier instant than the change,
   and every read under the new law of a later one: the clock is continuous where the law says so. */
static long wall(struct timespec *ts)
{
	struct page *p = attach();
	for (;;) {
		uint64_t before = atomic_load_explicit(&p->changes, memory_order_acquire);
		if (!(before & 1)) {
			long failed = syscall(SYS_clock_gettime, CLOCK_REALTIME, ts);
			if (failed)
				return failed;
			union { uint64_t bits; double value; } rate;
			rate.bits = atomic_load_explicit(&p->rate, memory_order_relaxed);
			int64_t base = atomic_load_explicit(&p->base, memory_order_relaxed);
			int64_t gone = ts->tv_sec * SECOND + ts->tv_nsec - atomic_load_explicit(&p->since, memory_order_relaxed);
			atomic_thread_fence(memory_order_acquire);
			if (atomic_load_explicit(&p->changes, memory_order_relaxed) == before) {
				if (rate.value != 1)
					gone = (int64_t)((double)gone * rate.value);
				ts->tv_sec = (base + gone) / SECOND;
				ts->tv_nsec = (base + gone) % SECOND;
				return 0;
			}
		}
		syscall(SYS_sched_yield);
	}
}

PUBLIC int clock_gettime(clockid_t id, struct timespec *ts)
{
	if (id == CLOCK_REALTIME || id == CLOCK_REALTIME_COARSE)
		return wall(ts);
	return syscall(SYS_clock_gettime, id, ts);
}

PUBLIC int gettimeofday(struct timeval *restrict tv, void *restrict zone)
{
	struct timespec ts;
	(void)zone; /* obsolete, and always UTC */
	if (wall(&ts))
		return -1;
	tv->tv_sec = ts.tv_sec;
	tv->tv_usec = ts.tv_nsec / 1000;
	return 0;
}

PUBLIC time_t time(time_t *t)
{
	struct timespec ts;
	if (wall(&ts))
		return -1;
	if (t)
		*t = ts.tv_sec;
	return ts.tv_sec;
}

PUBLIC int timespec_get(struct timespec *ts, int base)
{
	return base == TIME_UTC && !wall(ts) ? base : 0;
}
