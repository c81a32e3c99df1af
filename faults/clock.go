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

// Clock is the wall clock of one server, on Linux. It can jump, run fast or slow, or stop.
//
// Start the server with [Clock.Env], which preloads a shim for libc's wall clock. In force means that every later read of the
// clock sees the fault. CLOCK_MONOTONIC, timers and sleeps are unaffected, as on a real machine.
//
// It works for programs that get the time from libc (Redis, PostgreSQL, the JVM), but not for statically linked ones or Go. Check
// with [Clock.Confirm].
//
// Jumps add up, at any rate. [Clock.Rate] and [Clock.Hold] exclude each other. Heals work even with an ended context. Methods may
// be called concurrently.
type Clock struct {
	dir string

	mu        sync.Mutex
	law       law
	jumps     time.Duration
	rateFault bool
}

// law gives the time shown at the real time now: base + (now - since) * rate, in ns since 1970; as in clockshim.c.
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

// clockPage is as in clockshim.c.
type clockPage struct {
	changes     atomic.Uint64 // odd while the law is being changed
	since, base atomic.Int64
	rate        atomic.Uint64
}

const maxRate = 1000

// NewClock creates a clock that shows the real time, with the files [Clock.Shim] and [Clock.Page] in the existing directory dir.
// It compiles the shim with $CC or the system's C compiler. Except on Linux the error matches [errors.ErrUnsupported].
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
		return errors.New("LD_PRELOAD can't name a file in a directory with a space or a colon in its name; set TMPDIR to another, if it is temporary")
	}
	if err := createPage(c.Page()); err != nil {
		return err
	}
	if err := buildShim(ctx, c.Shim()); err != nil {
		_ = os.Remove(c.Shim())
		return errors.Join(err, os.Remove(c.Page()))
	}
	return c.change(func(now int64) law { return law{since: now, base: now, rate: 1} })
}

// createPage ignores the umask: servers often run as other users.
func createPage(path string) error {
	f, err := os.OpenFile(path, os.O_WRONLY|os.O_CREATE|os.O_EXCL, 0o644)
	if err != nil {
		return err
	}
	err = f.Truncate(int64(unsafe.Sizeof(clockPage{})))
	if err := errors.Join(err, f.Chmod(0o644), f.Close()); err != nil {
		return errors.Join(err, os.Remove(path))
	}
	return nil
}

// Shim returns the path of the library to preload.
func (c *Clock) Shim() string { return filepath.Join(c.dir, "clockshim.so") }

// Page returns the path of the file with the time.
func (c *Clock) Page() string { return filepath.Join(c.dir, "clock") }

// Env returns the server's environment variables. In a container, mount Shim and Page at the same paths. Without the page the
// server exits at once.
func (c *Clock) Env() []string {
	return []string{"LD_PRELOAD=" + c.Shim(), "FENCELAB_CLOCK=" + c.Page()}
}

// Now returns the server's time, in nanoseconds.
func (c *Clock) Now() time.Time {
	c.mu.Lock()
	defer c.mu.Unlock()
	return time.Unix(0, c.law.at(time.Now().UnixNano()))
}

// Offset returns how far the clock is ahead of the real one.
func (c *Clock) Offset() time.Duration {
	c.mu.Lock()
	defer c.mu.Unlock()
	now := time.Now().UnixNano()
	return time.Duration(c.law.at(now) - now)
}

// Jump moves the clock by d, which may be negative. The heal moves it back.
func (c *Clock) Jump(ctx context.Context, d time.Duration) (Heal, error) {
	return injectClock(ctx, fmt.Sprintf("clock jump by %v", d), func() error { return c.jump(d) }, func() error { return c.jump(-d) })
}

func injectClock(ctx context.Context, name string, begin, end func() error) (Heal, error) {
	if ctx.Err() != nil {
		return nil, fmt.Errorf("faults: %s: %w", name, context.Cause(ctx))
	}
	if err := begin(); err != nil {
		return nil, fmt.Errorf("faults: %s: %w", name, err)
	}
	return Once(func(context.Context) error {
		if err := end(); err != nil {
			return fmt.Errorf("faults: heal %s: %w", name, err)
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

// Rate makes the clock run at rate (0 to 1000) times real speed, from its current time. The heal undoes the gain or loss at once.
func (c *Clock) Rate(ctx context.Context, rate float64) (Heal, error) {
	return injectClock(ctx, fmt.Sprintf("clock rate %v", rate), func() error { return c.run(rate) }, c.restore)
}

// Hold stops the clock; its heal is that of [Clock.Rate]. Jumps still move it, so events can coincide exactly with an expiry. A
// server that waits for its wall clock to advance blocks.
func (c *Clock) Hold(ctx context.Context) (Heal, error) { return c.Rate(ctx, 0) }

func (c *Clock) run(rate float64) error {
	if !(rate >= 0 && rate <= maxRate) { // also rejects NaN
		return fmt.Errorf("the rate must be from 0 to %d", maxRate)
	}
	c.mu.Lock()
	defer c.mu.Unlock()
	if c.rateFault {
		return errors.New("another fault has set the rate of the clock")
	}
	if err := c.change(func(now int64) law { return law{since: now, base: c.law.at(now), rate: rate} }); err != nil {
		return err
	}
	c.rateFault = true
	return nil
}

func (c *Clock) restore() error {
	c.mu.Lock()
	defer c.mu.Unlock()
	if err := c.change(func(now int64) law { return law{since: now, base: now + int64(c.jumps), rate: 1} }); err != nil {
		return err
	}
	c.rateFault = false
	return nil
}

// change replaces the law with next(the real time). The caller holds mu. Readers wait while changes is odd and repeat a read that
// began before; otherwise a clock that is being stopped could go back.
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

// Confirm holds the clock and checks that the server follows it. readTime returns the server's time, in microseconds or finer.
func (c *Clock) Confirm(ctx context.Context, readTime func(context.Context) (time.Time, error)) (err error) {
	heal, err := c.Hold(ctx)
	if err != nil {
		return err
	}
	defer func() { err = errors.Join(err, heal(ctx)) }()
	want := c.Now().Truncate(time.Microsecond)
	got, err := readTime(ctx)
	if err != nil {
		return fmt.Errorf("faults: confirm clock: %w", err)
	}
	if got = got.Truncate(time.Microsecond); !got.Equal(want) {
		return fmt.Errorf("faults: the server doesn't follow its clock, which is held at %v: it shows %v", want, got)
	}
	return nil
}
