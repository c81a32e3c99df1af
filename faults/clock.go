package faults

import (
	"context"
	"errors"
	"fmt"
	"math"
	"os"
	"path/filepath"
	"runtime"
	"strings"
	"sync"
	"sync/atomic"
	"syscall"
	"time"
	"unsafe"
)

// Clock is the wall clock of one server, which may jump, run fast or slow, or stand still. Linux only.
//
// The server is started with [Clock.Env]: the dynamic linker preloads a shim that answers clock_gettime(CLOCK_REALTIME),
// gettimeofday, time and timespec_get. All processes started with one Clock's Env, and their children, show the same time. In
// force means that every read of the clock that begins from now on sees the fault.
//
// As on a real machine, CLOCK_MONOTONIC, timers and sleeps run on, and so does a wait until an absolute wall-clock time. Redis 7
// uses the wall clock for the expiry of keys and for the timeouts of blocked clients.
//
// It works for programs that ask their C library for the time: Redis, PostgreSQL, the JVM; not for statically linked ones, nor for
// Go's, which ask the kernel. [Clock.Confirm] tells.
//
// Jumps add up, also while the clock runs fast or stands still. Of [Clock.Rate] and [Clock.Hold] one is in force at a time; a
// second one is an error. A heal works with a context that has ended too. The methods may be called concurrently.
type Clock struct {
	dir string

	mu    sync.Mutex
	law   law
	jumps time.Duration // the sum of those in force
	speed int           // the fault that sets the rate; 0: none
	last  int           // the last that did
}

// law says what the clock shows at the real time now: base + (now - since) * rate, in nanoseconds since 1970.
// clockshim.c computes the same.
type law struct {
	since, base int64
	rate        float64
}

func (l law) at(now int64) int64 {
	if l.rate == 1 {
		return l.base + (now - l.since)
	}
	return l.base + int64(float64(now-l.since)*l.rate)
}

// clockPage is what server and Clock share, as in clockshim.c.
type clockPage struct {
	changes     atomic.Uint64 // odd while the law is being changed
	since, base atomic.Int64
	rate        atomic.Uint64
}

// maxRate keeps the clock in range for years.
const maxRate = 1000

// NewClock makes a clock that shows the real time, as the files [Clock.Shim] and [Clock.Page] in the existing directory dir, where
// the server must be able to read them.
//
// The shim is compiled by the C compiler that CC names, or the system's, and kept in the user's cache directory. Without a
// compiler NewClock fails, saying what to install; elsewhere than on Linux its error matches [errors.ErrUnsupported].
func NewClock(ctx context.Context, dir string) (*Clock, error) {
	c := &Clock{law: law{rate: 1}}
	if err := c.create(ctx, dir); err != nil {
		return nil, fmt.Errorf("faults: clock in %s: %w", dir, err)
	}
	return c, nil
}

func (c *Clock) create(ctx context.Context, dir string) (err error) {
	if runtime.GOOS != "linux" {
		return fmt.Errorf("clock faults need Linux: %w", errors.ErrUnsupported)
	}
	if c.dir, err = filepath.Abs(dir); err != nil {
		return err
	}
	if strings.ContainsAny(c.dir, " :") { // ld.so(8)
		return errors.New("LD_PRELOAD can't name a file in a directory with a space or a colon in its name")
	}
	shim, err := buildShim(ctx)
	if err != nil {
		return err
	}
	if err := writeNew(c.Shim(), shim); err != nil {
		return err
	}
	if err := writeNew(c.Page(), make([]byte, unsafe.Sizeof(clockPage{}))); err != nil {
		return errors.Join(err, os.Remove(c.Shim()))
	}
	return c.change(func(now int64) law { return law{since: now, base: now, rate: 1} })
}

// writeNew writes a new file that everybody may read, whatever the umask: servers like to run as users of their own.
func writeNew(path string, data []byte) error {
	f, err := os.OpenFile(path, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o644)
	if err != nil {
		return err
	}
	_, err = f.Write(data)
	if err := errors.Join(err, f.Chmod(0o644), f.Close()); err != nil {
		return errors.Join(err, os.Remove(path))
	}
	return nil
}

// Shim returns the path of the shared library that the server preloads.
func (c *Clock) Shim() string { return filepath.Join(c.dir, "clockshim.so") }

// Page returns the path of the file that tells the shim the time.
func (c *Clock) Page() string { return filepath.Join(c.dir, "clock") }

// Env returns the environment variables with which the server is to be started: LD_PRELOAD, which replaces any other, and
// FENCELAB_CLOCK. A container needs Shim and Page mounted at the paths that they have here. A server that finds the shim and
// not the page exits at once and says so.
func (c *Clock) Env() []string {
	return []string{"LD_PRELOAD=" + c.Shim(), "FENCELAB_CLOCK=" + c.Page()}
}

// Now returns what the server's clock shows, to the nanosecond.
func (c *Clock) Now() time.Time {
	c.mu.Lock()
	defer c.mu.Unlock()
	return time.Unix(0, c.law.at(time.Now().UnixNano()))
}

// Offset returns how far the server's clock is ahead of the real one; less than 0: behind.
func (c *Clock) Offset() time.Duration {
	c.mu.Lock()
	defer c.mu.Unlock()
	now := time.Now().UnixNano()
	return time.Duration(c.law.at(now) - now)
}

// Jump sets the clock forward by d, or back if d is less than 0. The heal sets it back, or forward, by as much.
func (c *Clock) Jump(ctx context.Context, d time.Duration) (Heal, error) {
	if ctx.Err() != nil {
		return nil, fmt.Errorf("faults: clock jump by %v: %w", d, context.Cause(ctx))
	}
	if err := c.jump(d); err != nil {
		return nil, fmt.Errorf("faults: clock jump by %v: %w", d, err)
	}
	return Once(func(context.Context) error {
		if err := c.jump(-d); err != nil {
			return fmt.Errorf("faults: heal clock jump by %v: %w", d, err)
		}
		return nil
	}), nil
}

func (c *Clock) jump(d time.Duration) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	shown := c.law.at(time.Now().UnixNano())
	if d > 0 && shown > math.MaxInt64/2-int64(d) || shown+int64(d) < 0 {
		return errors.New("the clock would leave the years 1970 to 2116")
	}
	if err := c.change(func(now int64) law {
		return law{since: now, base: c.law.at(now) + int64(d), rate: c.law.rate}
	}); err != nil {
		return err
	}
	c.jumps += d
	return nil
}

// Rate makes the clock run rate times as fast as the real one, from what it shows now; 0 to 1000. The heal takes back what the
// clock has gained or lost by it, at once.
func (c *Clock) Rate(ctx context.Context, rate float64) (Heal, error) {
	if ctx.Err() != nil {
		return nil, fmt.Errorf("faults: clock rate %v: %w", rate, context.Cause(ctx))
	}
	fault, err := c.run(rate)
	if err != nil {
		return nil, fmt.Errorf("faults: clock rate %v: %w", rate, err)
	}
	return func(context.Context) error {
		if err := c.restore(fault); err != nil {
			return fmt.Errorf("faults: heal clock rate %v: %w", rate, err)
		}
		return nil
	}, nil
}

// Hold stops the clock until the heal, which is that of [Clock.Rate]. Jumps still move it, so that things happen at the same
// instant, or exactly when something expires. A server that waits for the wall clock to move on waits as long.
func (c *Clock) Hold(ctx context.Context) (Heal, error) { return c.Rate(ctx, 0) }

func (c *Clock) run(rate float64) (fault int, err error) {
	if !(rate >= 0 && rate <= maxRate) { // NaN is neither
		return 0, fmt.Errorf("the rate must be from 0 to %d", maxRate)
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.speed != 0 {
		return 0, errors.New("the clock's rate is another fault's")
	}
	if err := c.change(func(now int64) law { return law{since: now, base: c.law.at(now), rate: rate} }); err != nil {
		return 0, err
	}
	c.last++
	c.speed = c.last
	return c.speed, nil
}

// restore ends a fault that sets the rate, unless it has ended.
func (c *Clock) restore(fault int) error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.speed != fault {
		return nil
	}
	if err := c.change(func(now int64) law { return law{since: now, base: now + int64(c.jumps), rate: 1} }); err != nil {
		return err
	}
	c.speed = 0
	return nil
}

// change replaces the law by what next makes of the real time, at that time. The caller holds mu.
//
// Readers wait while changes is odd, and repeat a read that began before. So next's now is after the last read under the old law
// and before the first under the new. With a pair of laws, one of which is valid, nobody would wait, but a clock that is stopped
// would go back by the time between reading now and publishing the law.
func (c *Clock) change(next func(now int64) law) error {
	f, err := os.OpenFile(c.Page(), os.O_RDWR, 0)
	if err != nil {
		return err
	}
	const size = int(unsafe.Sizeof(clockPage{}))
	mem, err := syscall.Mmap(int(f.Fd()), 0, size, syscall.PROT_READ|syscall.PROT_WRITE, syscall.MAP_SHARED)
	if err := errors.Join(err, f.Close()); err != nil {
		return err
	}
	p := (*clockPage)(unsafe.Pointer(unsafe.SliceData(mem)))
	p.changes.Add(1)
	c.law = next(time.Now().UnixNano())
	p.since.Store(c.law.since)
	p.base.Store(c.law.base)
	p.rate.Store(math.Float64bits(c.law.rate))
	p.changes.Add(1)
	return syscall.Munmap(mem)
}

// Confirm checks that the server follows the clock: ask returns what the server's clock shows, to the microsecond or finer. The
// clock is held meanwhile, so ask must return that very microsecond. (The same millisecond may be the real one.)
func (c *Clock) Confirm(ctx context.Context, ask func(context.Context) (time.Time, error)) (err error) {
	heal, err := c.Hold(ctx)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, heal(ctx)) }()
	want := c.Now().Truncate(time.Microsecond)
	got, err := ask(ctx)
	if err != nil {
		return fmt.Errorf("faults: confirm clock: %w", err)
	}
	if got = got.Truncate(time.Microsecond); !got.Equal(want) {
		return fmt.Errorf("faults: the server doesn't follow its clock, which is held at %v: it shows %v", want, got)
	}
	return nil
}
