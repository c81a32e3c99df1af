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
	"syscall"
	"time"

	"github.com/fencelab/fencelab/dlock"
	"github.com/fencelab/fencelab/internal/cli"
	"github.com/fencelab/fencelab/internal/open/locks"
	"github.com/fencelab/fencelab/internal/proc"
)

var execCommand = cli.Command{
	Name: "fencelab exec", Args: "-- COMMAND [ARG...]",
	About: `
Runs a command under a lock that is renewed every third of -ttl. The environment has
FENCE_KEY, and FENCE_TOKEN and FENCE_SEQ for the command's first fenced read or write;
for further ones it counts FENCE_SEQ up.

If the lease can't be renewed, the command gets SIGTERM a sixth of -ttl before the
lease ends, and SIGKILL a thirtieth before; if the lock service takes the lease away,
SIGKILL at once. A frozen machine misses these timers: the token protects the data.

Signals go to the command's process group, which can't read from a terminal. What is
left of it when the command or fencelab ends, by kill -9 too, is killed.

Exit codes: the command's; 128+N if signal N ended it, or the wait; 75 (-held-code)
if another holds the lock; 124 if the lease was lost; 125 if fencelab failed;
126 and 127 if the command can't be run or doesn't exist.`,
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
)

// passedOn lists what isn't ignored: by nohup, or by a shell's &. cli.Main changes that.
var passedOn = slices.DeleteFunc([]os.Signal{
	syscall.SIGINT, syscall.SIGTERM, syscall.SIGHUP, syscall.SIGQUIT, syscall.SIGUSR1, syscall.SIGUSR2,
}, signal.Ignored)

// Parts of the TTL. Two renewals have failed by the first.
const (
	termBefore = 6
	killBefore = 30
)

const (
	releaseTimeout = 2 * time.Second
	killMost       = 5 // seconds until a command that SIGKILL doesn't end is given up
)

func exit(code int, err error) error {
	if err != nil {
		err = fmt.Errorf("fencelab exec: %w", err)
	}
	return &cli.ExitError{Code: code, Err: err}
}

func runExec(ctx context.Context, args []string, stdout io.Writer) (err error) {
	defer func() {
		if _, coded := errors.AsType[*cli.ExitError](err); err != nil && !coded && !errors.Is(err, flag.ErrHelp) {
			err = exit(exitFailed, err)
		}
	}()
	var flags flag.FlagSet
	var o dlock.Options
	url := flags.String("lock", "", "`URL` of the lock: "+locks.URLs)
	key := flags.String("key", "", "`key` of the lock")
	flags.DurationVar(&o.TTL, "ttl", 30*time.Second, "how long a lease lasts unless it is renewed: how long a dead holder blocks the key")
	flags.DurationVar(&o.Renew.MaxHold, "max-hold", 24*time.Hour, "the longest time for which a lease is renewed; the command is stopped within a -ttl after it")
	wait := flags.Duration("wait", 0, "how long to wait for the lock at most; 0: until it is free")
	try := flags.Bool("n", false, "don't wait, and say nothing if another holds the lock")
	held := flags.Int("held-code", exitHeld, "exit `code` if another holds the lock")
	o.Logger = cli.Logger(&flags)
	if err := execCommand.Parse(&flags, args, stdout); err != nil {
		return err
	}
	if flags.NArg() == 0 || *key == "" || *wait < 0 || *try && *wait > 0 || *held&0xff != *held {
		return errors.New("want fencelab exec -lock URL -key KEY [-n | -wait 10s] [-held-code 0..255] -- COMMAND [ARG...]")
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
	signals := make(chan os.Signal, 16)
	for _, s := range passedOn {
		signal.Notify(signals, s)
	}
	signal.Notify(make(chan os.Signal, 1), syscall.SIGTSTP) // Ctrl-Z would stop the renewals alone
	signal.Ignore(syscall.SIGTTIN, syscall.SIGTTOU)         // in the command too: stopped, it would keep the lock

	ctx = context.WithoutCancel(ctx) // signals are passed on
	limit := cli.ReachTimeout
	if spec.Lock == locks.S3 {
		limit = time.Minute // about twenty requests, one after the other, check that the lock is one
	}
	var backend *locks.Backend
	if err := cli.ReachWithin(ctx, limit, func(ctx context.Context) (err error) {
		backend, err = locks.Open(ctx, spec)
		return err
	}); err != nil {
		return fmt.Errorf("%w (is %v?)", err, spec)
	}
	locker, err := dlock.New(backend, &o)
	if err != nil {
		return errors.Join(err, backend.Close())
	}
	defer func() { _ = locker.Close() }()
	if err := cli.Reach(ctx, backend.Ping); err != nil { // it would look like a lock that is held
		return fmt.Errorf("%v doesn't answer: %w", spec, err)
	}
	h, err := acquire(ctx, locker, *key, *try, *wait, signals)
	if errors.Is(err, dlock.ErrHeld) || errors.Is(err, dlock.ErrQueueFull) {
		if *try {
			err = nil
		}
		return exit(*held, err)
	}
	if err != nil {
		return err
	}
	err = runUnder(ctx, h, cmd, signals)
	ctx, cancel := context.WithTimeout(ctx, releaseTimeout)
	defer cancel()
	switch failed := h.Release(ctx); {
	case failed == nil, errors.Is(err, dlock.ErrLost):
	case errors.Is(failed, dlock.ErrLost):
		return exit(exitLost, fmt.Errorf("the command has ended, and may have overlapped another holder's: %w", failed))
	default:
		o.Logger.Warn("the lock could not be released; it is free when its lease ends", "err", failed)
	}
	return err
}

// acquire ends at a signal too.
func acquire(ctx context.Context, l *dlock.Locker, key string, try bool, wait time.Duration, signals <-chan os.Signal) (*dlock.Handle, error) {
	ctx, cancel := context.WithCancel(ctx)
	defer cancel()
	if wait > 0 {
		ctx, cancel = context.WithTimeoutCause(ctx, wait, fmt.Errorf("the lock was not free within %v (-wait)", wait))
		defer cancel()
	}
	f := l.Acquire
	if try {
		f = l.TryAcquire
	}
	var h *dlock.Handle
	granted := make(chan error, 1)
	go func() {
		var err error
		h, err = f(ctx, key)
		granted <- err
	}()
	select {
	case err := <-granted:
		return h, err
	case s := <-signals:
		cancel()
		var err error
		if <-granted == nil {
			err = h.Release(ctx)
		}
		return nil, exit(exitSignal+int(s.(syscall.Signal)), err)
	}
}

// runUnder runs cmd under a lease. The error has the exit code of a command that failed.
func runUnder(ctx context.Context, h *dlock.Handle, cmd *exec.Cmd, signals <-chan os.Signal) (err error) {
	if err := h.Renew(ctx); err != nil && !errors.Is(err, dlock.ErrMaxHold) { // one that was handed over can be short
		return err
	}
	g, err := startGuard()
	if err != nil {
		return fmt.Errorf("can't guard the command's process group: %w", err)
	}
	defer g.end()
	if lost := context.Cause(h.Context()); lost != nil { //nolint:contextcheck // the handle's
		return fmt.Errorf("the command was not started: %w", lost)
	}
	token, seq := h.Next()
	cmd.Env = append(os.Environ(), "FENCE_KEY="+h.Key(), "FENCE_TOKEN="+strconv.FormatUint(token, 10), "FENCE_SEQ="+strconv.FormatUint(seq, 10))
	cmd.Stdin, cmd.Stdout, cmd.Stderr = os.Stdin, os.Stdout, os.Stderr
	cmd.SysProcAttr = &syscall.SysProcAttr{Pgid: g.Process.Pid}
	c, err := proc.Start(cmd)
	if err != nil {
		return exit(cannotRun(err), err)
	}
	send := func(s syscall.Signal) {
		g.signal(s)
		// It may have a group of its own, as timeout and setsid make.
		if group, err := syscall.Getpgid(c.PID); err == nil && group != g.Process.Pid && cmd.Process.Signal(syscall.Signal(0)) == nil {
			_ = syscall.Kill(-group, s)
			_ = syscall.Kill(-group, syscall.SIGCONT)
		}
	}
	if err := supervise(h, c.Exited(), send, signals); err != nil { //nolint:contextcheck // the handle's
		return exit(exitLost, fmt.Errorf("the command was stopped: %w", err))
	}
	err = c.Wait()
	failed, ok := errors.AsType[*exec.ExitError](err)
	if !ok {
		return err
	}
	if ws := failed.Sys().(syscall.WaitStatus); ws.Signaled() {
		return exit(exitSignal+int(ws.Signal()), nil)
	}
	return exit(failed.ExitCode(), nil)
}

func cannotRun(err error) (code int) {
	if errors.Is(err, exec.ErrNotFound) || errors.Is(err, fs.ErrNotExist) {
		return exitNotFound
	}
	return exitCannotRun
}

// supervise returns when the command has exited: nil, or why it was stopped.
func supervise(h *dlock.Handle, exited <-chan struct{}, send func(syscall.Signal), signals <-chan os.Signal) (lost error) {
	term, kill := h.TTL()/termBefore, h.TTL()/killBefore
	check := time.NewTimer(0)
	defer check.Stop()
	over := h.Context().Done()
	for kills := 0; ; {
		select {
		case <-exited:
			return lost
		case s := <-signals:
			send(s.(syscall.Signal))
		case <-over:
			over, lost = nil, context.Cause(h.Context())
			check.Reset(0)
		case <-check.C:
			switch left := time.Until(h.Until()); {
			case kills == killMost:
				return fmt.Errorf("%w; but it can't be killed, and still runs", lost)
			case lost != nil:
				send(syscall.SIGKILL)
				kills++
				check.Reset(time.Second)
			case left > term: // renewed meanwhile
				check.Reset(left - term)
			default:
				lost = fmt.Errorf("%w: it was not renewed", dlock.ErrLost)
				send(syscall.SIGTERM)
				check.Reset(left - kill)
			}
		}
	}
}

// guard leads the command's process group, and kills it when this process is gone: the kernel then closes the guard's input.
type guard struct{ *exec.Cmd }

const guardScript = `trap '' HUP INT QUIT TERM USR1 USR2 ALRM PIPE ABRT TSTP TTIN TTOU; echo; read -r _; kill -KILL 0`

func startGuard() (*guard, error) {
	g := &guard{exec.Command("/bin/sh", "-c", guardScript, "fencelab-guard")} //nolint:noctx // end ends it
	g.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	_, errIn := g.StdinPipe()
	ready, errOut := g.StdoutPipe()
	if err := errors.Join(errIn, errOut, g.Start()); err != nil {
		return nil, err
	}
	if _, err := ready.Read(make([]byte, 1)); err != nil {
		g.end()
		return nil, err
	}
	return g, nil
}

// signal signals the group, which is there until the guard is reaped, and lets stopped processes have it.
func (g *guard) signal(s syscall.Signal) {
	_ = syscall.Kill(-g.Process.Pid, s)
	_ = syscall.Kill(-g.Process.Pid, syscall.SIGCONT)
}

// end kills the group and waits until it is gone, or for a second: the next holder must not meet its last write.
func (g *guard) end() {
	g.signal(syscall.SIGKILL)
	_ = g.Wait()
	for began := time.Now(); time.Since(began) < time.Second && !errors.Is(syscall.Kill(-g.Process.Pid, 0), syscall.ESRCH); {
		<-time.After(time.Millisecond) // nothing tells when a group is gone
	}
}
