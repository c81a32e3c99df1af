// Package cli is shared by the commands: flags and their environment variables, help, logs, signals and files.
package cli

import (
	"cmp"
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"log/slog"
	"net"
	"os"
	"os/signal"
	"slices"
	"strconv"
	"strings"
	"syscall"
	"time"

	"github.com/peterbourgon/ff/v3"
)

const envPrefix = "FENCELAB"

// ExitError makes [Main] exit with Code, and print Err unless it is nil.
type ExitError struct {
	Code int
	Err  error
}

func (e *ExitError) Error() string { return fmt.Sprintf("exit status %d: %v", e.Code, e.Err) }

// Unwrap returns e.Err.
func (e *ExitError) Unwrap() error { return e.Err }

// Main calls run and exits with 0 after success or -h, an [ExitError]'s code, or else 1. ctx ends at the first SIGINT or SIGTERM;
// the second kills.
func Main(run func(ctx context.Context, args []string, stdout io.Writer) error) {
	// A closed pipe is a write error, and must not leave servers behind. Child processes would inherit signal.Ignore.
	signal.Notify(make(chan os.Signal, 1), syscall.SIGPIPE)
	signals, stop := signal.NotifyContext(context.Background(), os.Interrupt, syscall.SIGTERM)
	ctx, cancel := context.WithCancelCause(context.Background())
	context.AfterFunc(signals, func() {
		stop() // first, so that the next signal is sure to kill
		cancel(context.Cause(signals))
	})
	err := run(ctx, os.Args[1:], os.Stdout)
	if err == nil || errors.Is(err, flag.ErrHelp) {
		return
	}
	code := 1
	if exit, ok := errors.AsType[*ExitError](err); ok {
		code, err = exit.Code, exit.Err
	}
	if err != nil {
		fmt.Fprintln(os.Stderr, err)
	}
	os.Exit(code)
}

// Command is what -h shows besides the flags.
type Command struct {
	Name     string
	Args     string // as in "FILE..."; empty: none
	About    string // lines of text
	Examples string
}

// Parse sets the flags of fs from args, or else from the environment. For -h it writes help to stdout and returns [flag.ErrHelp].
func (c Command) Parse(fs *flag.FlagSet, args []string, stdout io.Writer) error {
	fs.Init(c.Name, flag.ContinueOnError)
	fs.SetOutput(io.Discard)
	fs.Usage = func() {}
	err := ff.Parse(fs, args, ff.WithEnvVarPrefix(envPrefix))
	switch {
	case errors.Is(err, flag.ErrHelp):
		return errors.Join(c.help(fs, stdout), flag.ErrHelp)
	case err != nil:
		err = cmp.Or(errors.Unwrap(err), err)
		fs.VisitAll(func(f *flag.Flag) {
			if g, ok := f.Value.(flag.Getter); ok && strings.HasSuffix(err.Error(), "for flag -"+f.Name+": parse error") {
				if _, is := g.Get().(time.Duration); is {
					err = fmt.Errorf("%w: want a number and a unit, as in 10s or 5m", err)
				}
			}
		})
		return fmt.Errorf("%s: %w (%s -h lists the flags)", c.Name, err, c.Name)
	case c.Args == "" && fs.NArg() > 0:
		return fmt.Errorf("%s: unexpected argument %q: flags start with a dash (%s -h lists them)", c.Name, fs.Arg(0), c.Name)
	}
	return nil
}

func (c Command) help(fs *flag.FlagSet, w io.Writer) error {
	var b strings.Builder
	fmt.Fprintf(&b, "Usage: %s\n\n%s\n\n", strings.TrimSpace(c.Name+" [flags] "+c.Args), strings.TrimSpace(c.About))
	b.WriteString("Flags, each also an environment variable; the flag wins:\n")
	fs.VisitAll(func(f *flag.Flag) {
		arg, usage := flag.UnquoteUsage(f)
		fmt.Fprintf(&b, "\n  -%s", f.Name)
		if arg != "" {
			b.WriteString(" " + arg)
		}
		fmt.Fprintf(&b, "  (%s_%s", envPrefix, strings.ToUpper(strings.ReplaceAll(f.Name, "-", "_")))
		if f.DefValue != "" {
			b.WriteString(", default " + f.DefValue)
		}
		fmt.Fprintf(&b, ")\n        %s\n", strings.ReplaceAll(usage, "\n", "\n        "))
	})
	fmt.Fprintf(&b, "\nExamples:\n\n%s\n", strings.Trim(c.Examples, "\n"))
	_, err := io.WriteString(w, b.String())
	return err
}

// Choice defines a flag with the given values. The first is the default.
func Choice(fs *flag.FlagSet, name, usage string, values ...string) *string {
	v := &choice{value: values[0], values: values}
	fs.Var(v, name, "`"+strings.Join(values, "|")+"`: "+usage)
	return &v.value
}

type choice struct {
	value  string
	values []string
}

func (c *choice) String() string { return c.value }

func (c *choice) Set(s string) error {
	if !slices.Contains(c.values, s) {
		return fmt.Errorf("want %s", strings.Join(c.values, " or "))
	}
	c.value = s
	return nil
}

// Logger defines -log-level, and returns a text logger on standard error.
func Logger(fs *flag.FlagSet) *slog.Logger {
	level := new(slog.LevelVar)
	fs.TextVar(level, "log-level", new(slog.LevelVar), "`debug|info|warn|error`: minimum level of messages logged to standard error")
	return slog.New(slog.NewTextHandler(os.Stderr, &slog.HandlerOptions{Level: level}))
}

// ReachTimeout is how long [Reach] waits.
const ReachTimeout = 5 * time.Second

// Reach calls f, which has ReachTimeout to succeed.
func Reach(ctx context.Context, f func(ctx context.Context) error) error {
	return ReachWithin(ctx, ReachTimeout, f)
}

// ReachWithin is Reach with another limit.
func ReachWithin(ctx context.Context, limit time.Duration, f func(ctx context.Context) error) error {
	ctx, cancel := context.WithTimeoutCause(ctx, limit, fmt.Errorf("no answer within %v", limit))
	defer cancel()
	if err := f(ctx); err != nil {
		return OrEnd(ctx, err)
	}
	return nil
}

// OrEnd returns ctx's cause if it has ended, else err. A connection may report ctx's deadline, as an i/o timeout, before ctx does.
func OrEnd(ctx context.Context, err error) error {
	if end, ok := ctx.Deadline(); ok && !time.Now().Before(end) {
		<-ctx.Done()
	}
	return cmp.Or(context.Cause(ctx), err)
}

// Listen listens on addr, the value of the flag name: host:port, or fd:N for an inherited socket.
func Listen(ctx context.Context, name, addr string) (net.Listener, error) {
	if s, ok := strings.CutPrefix(addr, "fd:"); ok {
		return inherited(name, s)
	}
	ln, err := new(net.ListenConfig).Listen(ctx, "tcp", addr)
	switch {
	case errors.Is(err, syscall.EADDRINUSE):
		return nil, fmt.Errorf("address %s is in use: stop what listens there, or choose another with -%s (port 0 takes a free one): %w",
			addr, name, err)
	case err != nil:
		return nil, fmt.Errorf("can't listen on -%s %s: %w", name, addr, err)
	}
	return ln, nil
}

func inherited(name, fd string) (net.Listener, error) {
	n, err := strconv.ParseUint(fd, 10, 16)
	if err != nil || n < 3 {
		return nil, fmt.Errorf("-%s fd:%s: want the number of an inherited file descriptor, 3 or more", name, fd)
	}
	f := os.NewFile(uintptr(n), "listener")
	ln, err := net.FileListener(f) // a duplicate
	if err := errors.Join(err, f.Close()); err != nil {
		return nil, fmt.Errorf("-%s fd:%s is not a listening socket: %w", name, fd, err)
	}
	return ln, nil
}
