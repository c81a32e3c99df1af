package main

import (
	"context"
	"errors"
	"flag"
	"fmt"
	"io"
	"io/fs"
	"os"
	"os/exec"
	"os/signal"
	"slices"
	"strconv"
	"strings"
	"sync"
	"syscall"
	"time"

	"github.com/fencelab/fencelab/dlock"
	"github.com/fencelab/fencelab/internal/cli"
	"github.com/fencelab/fencelab/internal/open/locks"
)

var execCommand = cli.Command{
	Name: "fencelab exec", Args: "-- COMMAND [ARG...]",
	About: `
Runs a command under a lock that is renewed every third of -ttl. The environment has
FENCE_KEY, and FENCE_TOKEN and FENCE_SEQ for the command's first fenced read or write;
the command must add 1 to FENCE_SEQ for each further one.

If the lease can't be renewed, the command gets SIGTERM a sixth of -ttl before the
lease ends, and SIGKILL a thirtieth before; if the lock service takes the lease away,
SIGKILL at once. A frozen machine misses these timers: the token protects the data.

Signals go to the command and all its descendants, which can't read from a terminal.
Those left when the command or fencelab ends, even by kill -9, are killed. (On other
systems than Linux: the command's process group.)

Exit codes: the command's; 128+N if signal N ended it, or the wait; 75 (-held-code)
if another client holds the lock; 124 (-lost-code) if the lease was lost, or a
process can't be killed; 125 if fencelab failed; 126 and 127 if the command can't be
run or doesn't exist.`,
	Examples: `
  fencelab exec -lock redis://127.0.0.1:6379 -key nightly -n -- ./backup.sh --all
  FENCELAB_LOCK=postgres://app:secret@db/app fencelab exec -key nightly -wait 10s -- ./job.sh   # ps doesn't show it`,
}

// Exit codes: sysexits(3)'s EX_TEMPFAIL, and timeout(1)'s.
const (
	exitHeld      = 75
	exitLost      = 124
	exitFailed    = 125
	exitCannotRun = 126
	exitNotFound  = 127
	exitSignal    = 128 // plus the signal
	codeLost      = 256 // stands for -lost-code; no command exits with it
)

// forwardedSignals lists the signals to pass on, except ignored ones: SIGHUP under nohup, SIGINT under a shell's &. (Go doesn't report
// others.)
var forwardedSignals = slices.DeleteFunc([]os.Signal{
	syscall.SIGINT, syscall.SIGTERM, syscall.SIGHUP, syscall.SIGQUIT, syscall.SIGUSR1, syscall.SIGUSR2,
}, signal.Ignored)

// Parts of the TTL. By termBefore, two renewals have failed.
const (
	termBefore = 6
	killBefore = 30
)

const (
	minTTL         = time.Second
	releaseTimeout = 2 * time.Second
	maxKills       = 5 // seconds until a command that survives SIGKILL is given up
)

// caught has all signals since the start: cli.Main's ctx doesn't tell which it was.
var caught = make(chan os.Signal, 16)

func catchSignals() {
	for _, s := range forwardedSignals {
		signal.Notify(caught, s)
	}
}

func exit(code int, err error) error {
	if err != nil && !strings.HasPrefix(err.Error(), execCommand.Name+":") {
		err = fmt.Errorf("%s: %w", execCommand.Name, err)
	}
	return &cli.ExitError{Code: code, Err: err}
}

func runExec(ctx context.Context, args []string, stdout io.Writer) (err error) {
	lostCode := exitLost
	defer func() {
		coded, ok := errors.AsType[*cli.ExitError](err)
		switch {
		case ok && coded.Code == codeLost:
			coded.Code = lostCode
		case err != nil && !ok && !errors.Is(err, flag.ErrHelp):
			err = exit(exitFailed, err)
		}
	}()
	var flags flag.FlagSet
	var o dlock.Options
	url := flags.String("lock", "", "`URL` of the lock: "+locks.URLs)
	key := flags.String("key", "", "`key` of the lock")
	flags.DurationVar(&o.TTL, "ttl", 20*time.Second, "how long a lease lasts unless it is renewed, and a dead holder blocks the key; at least 1s; "+
		"with ZooKeeper at most half of the servers' maxSessionTimeout, that is 20s with their default of 40s")
	flags.DurationVar(&o.Renew.MaxHold, "max-hold", 24*time.Hour, "stop renewing the lease after this long; the command is stopped within one -ttl after that")
	wait := flags.Duration("wait", 0, "maximum time to wait for the lock; 0: no limit")
	try := flags.Bool("n", false, "don't wait, and print nothing if another client holds the lock")
	held := flags.Int("held-code", exitHeld, "exit `code` if another client holds the lock")
	flags.IntVar(&lostCode, "lost-code", exitLost, "exit `code` if the lease was lost; timeout has the same default")
	o.Logger = cli.Logger(&flags)
	if err := execCommand.Parse(&flags, args, stdout); err != nil {
		return err
	}
	if envN, envWait := os.Getenv("FENCELAB_N") != "", os.Getenv("FENCELAB_WAIT") != ""; *try && *wait > 0 && envN != envWait { // the flag wins
		if *try = envWait; *try {
			*wait = 0
		}
	}
	switch {
	case *url == "":
		return errors.New("want -lock URL, or FENCELAB_LOCK in the environment: " + locks.URLs)
	case *key == "":
		return errors.New("want -key KEY: the same for all jobs that must not overlap")
	case flags.NArg() == 0:
		return errors.New("want a command: fencelab exec -lock URL -key KEY -- COMMAND [ARG...]")
	case *wait < 0 || *try && *wait > 0:
		return errors.New("want -n or a positive -wait, not both")
	case *held&0xff != *held:
		return fmt.Errorf("-held-code is %d; an exit code is 0 to 255", *held)
	case lostCode&0xff != lostCode:
		return fmt.Errorf("-lost-code is %d; an exit code is 0 to 255", lostCode)
	case o.TTL < minTTL:
		return fmt.Errorf("-ttl is %v; want at least %v: a command is stopped when a sixth of it is left, and needs time to end", o.TTL, minTTL)
	case o.Renew.MaxHold <= 0:
		return fmt.Errorf("-max-hold is %v; want a positive duration, after which the lease is no longer renewed", o.Renew.MaxHold)
	}
	cmd := exec.Command(flags.Arg(0), flags.Args()[1:]...) //nolint:noctx // it ends with the lease
	if cmd.Err != nil {
		return exit(cannotRun(cmd.Err), cmd.Err)
	}
	spec, err := locks.ParseURL(*url)
	if err != nil {
		return fmt.Errorf("-lock: %w", err)
	}
	spec.TTL, o.Renew.Every = o.TTL, o.TTL/3
	if _, err := dlock.New(struct{ dlock.Backend }{}, &o); err != nil { // before connecting
		return err
	}
	signal.Notify(make(chan os.Signal, 1), syscall.SIGTSTP) // Ctrl-Z would stop only the renewals
	signal.Ignore(syscall.SIGTTIN, syscall.SIGTTOU)         // in the command too: stopped, it would keep the lock

	ctx, begin := untilSignal(context.WithoutCancel(ctx), caught)
	defer func() {
		if stopped := begin(); err != nil && stopped != nil {
			err = stopped
		}
	}()
	backend, err := locks.Reach(ctx, spec)
	if err != nil {
		return fmt.Errorf("can't use %v: %w (are the port, TLS and the password in the URL right?)", spec, err)
	}
	locker, err := dlock.New(backend, &o)
	if err != nil {
		return errors.Join(err, backend.Close())
	}
	defer func() {
		if !errors.Is(err, errStillRuns) {
			_ = locker.Close()
		}
	}()
	var h *dlock.Handle
	if *try {
		h, err = locker.TryAcquire(ctx, *key)
	} else {
		h, err = locks.Acquire(ctx, locker, *key, *wait)
	}
	if errors.Is(err, dlock.ErrHeld) || errors.Is(err, dlock.ErrQueueFull) {
		if *try {
			err = nil
		}
		return exit(*held, err)
	}
	if err != nil {
		return err
	}
	err = runUnder(ctx, h, cmd, o.Renew.MaxHold, begin)
	if errors.Is(err, errStillRuns) {
		return err // the lock must not be free before the lease ends
	}
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), releaseTimeout)
	defer cancel()
	switch failed := h.Release(ctx); {
	case failed == nil, errors.Is(err, dlock.ErrLost):
	case errors.Is(failed, dlock.ErrLost):
		return exit(codeLost, fmt.Errorf("the command has ended with exit code %d, but may have overlapped with another holder's: %w", exitCode(err), failed))
	default:
		o.Logger.Warn("the lock could not be released; it is free when its lease ends", "err", failed)
	}
	return err
}

// untilSignal returns a context that a signal ends, until begin is called, after which signals are the command's. begin returns
// the exit code of an earlier signal.
func untilSignal(ctx context.Context, signals <-chan os.Signal) (_ context.Context, begin func() error) {
	ctx, cancel := context.WithCancelCause(ctx)
	stop, stopped := make(chan struct{}), make(chan struct{})
	cancelBy := func(s os.Signal) { cancel(exit(exitSignal+int(s.(syscall.Signal)), nil)) }
	go func() {
		defer close(stopped)
		select {
		case s := <-signals:
			cancelBy(s)
		case <-stop:
		}
	}()
	return ctx, sync.OnceValue(func() error {
		close(stop)
		<-stopped
		select {
		case s := <-signals:
			cancelBy(s)
		default:
		}
		return context.Cause(ctx)
	})
}

// errStillRuns can mean that a process has other privileges. Then the lock isn't released.
var errStillRuns = errors.New("a process can't be killed and is still running")

// confirm renews a lease, as one that was handed over can be short. One that is long enough needs no answer: it is renewed again.
func confirm(ctx context.Context, h *dlock.Handle) error {
	ctx, cancel := context.WithTimeout(ctx, h.TTL()/4)
	defer cancel()
	err := h.Renew(ctx)
	if errors.Is(err, dlock.ErrMaxHold) || !errors.Is(err, dlock.ErrLost) && time.Until(h.Until()) > h.TTL()/2 {
		return nil
	}
	return err
}

// runUnder calls begin and runs cmd under a lease. The error has a failed command's exit code.
func runUnder(ctx context.Context, h *dlock.Handle, cmd *exec.Cmd, maxHold time.Duration, begin func() error) (err error) {
	if err := confirm(ctx, h); err != nil {
		return err
	}
	token, seq := h.Next()
	env := append(os.Environ(), "FENCE_KEY="+h.Key(), "FENCE_TOKEN="+strconv.FormatUint(token, 10), "FENCE_SEQ="+strconv.FormatUint(seq, 10))
	g, err := startGuard(ctx, h.Context(), cmd, env)
	if err == nil {
		defer g.Close()
		err = begin()
	} else {
		err = fmt.Errorf("can't guard the command: %w", err)
	}
	if lost := context.Cause(h.Context()); lost != nil { //nolint:contextcheck // the handle's
		return fmt.Errorf("the command was not started: %w", lost)
	}
	if err != nil {
		return err
	}
	g.signal(startCommand)
	lost := supervise(h, g.exited, g.signal, caught, maxHold) //nolint:contextcheck // the handle's
	if errors.Is(lost, errStillRuns) {
		return exit(codeLost, fmt.Errorf("the command was stopped: %w", lost))
	}
	code, left := g.result()
	why := fmt.Errorf("the command has ended with exit code %d", code)
	if lost != nil {
		why = fmt.Errorf("the command was stopped, with exit code %d: %w", code, lost)
	}
	switch {
	case left != nil:
		return exit(codeLost, fmt.Errorf("%w, but %w; the lock is free when its lease ends", why, left))
	case lost != nil:
		return exit(codeLost, why)
	case code != 0:
		return exit(code, nil)
	}
	return nil
}

// exitCode is the command's, in runUnder's error or nil.
func exitCode(err error) int {
	if e, ok := errors.AsType[*cli.ExitError](err); ok {
		return e.Code
	}
	return 0
}

func cannotRun(err error) (code int) {
	if errors.Is(err, exec.ErrNotFound) || errors.Is(err, fs.ErrNotExist) {
		return exitNotFound
	}
	return exitCannotRun
}

// supervise returns nil when the command has exited, or why it was stopped.
func supervise(h *dlock.Handle, exited <-chan struct{}, send func(syscall.Signal), signals <-chan os.Signal, maxHold time.Duration) (lost error) {
	term, kill := h.TTL()/termBefore, h.TTL()/killBefore
	check := time.NewTimer(0)
	defer check.Stop()
	ended := h.Context().Done()
	for kills := 0; ; {
		select {
		case <-exited:
			return lost
		case s := <-signals:
			send(s.(syscall.Signal))
		case <-ended:
			ended, lost = nil, context.Cause(h.Context())
			check.Reset(0)
		case <-check.C:
			switch left := time.Until(h.Until()); {
			case kills == maxKills:
				return fmt.Errorf("%w; but %w", lost, errStillRuns)
			case lost != nil:
				send(syscall.SIGKILL)
				kills++
				check.Reset(time.Second)
			case left > term:
				check.Reset(left - term)
			default:
				lost = fmt.Errorf("%w: it was not renewed", dlock.ErrLost)
				if time.Since(h.AcquiredAt()) >= maxHold {
					lost = fmt.Errorf("%w: the lock was held for %v (-max-hold)", dlock.ErrLost, maxHold)
				}
				send(syscall.SIGTERM)
				check.Reset(left - kill)
			}
		}
	}
}
