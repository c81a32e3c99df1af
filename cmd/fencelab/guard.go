package main

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"io"
	"os"
	"os/exec"
	"os/signal"
	"runtime"
	"strconv"
	"syscall"
	"time"

	"golang.org/x/sys/unix"

	"github.com/fencelab/fencelab/internal/proc"
)

// guardName makes this program a guard. It isn't for users.
const guardName = "exec-guard"

// startCommand is the first of a guard's orders; the others are signals for the command.
const startCommand syscall.Signal = 0

// guard is the process that starts the command: it leads the command's process group and adopts its orphans. When the command
// or this process has ended, for which the kernel closes orders, it kills what is left of them.
type guard struct {
	*exec.Cmd
	orders, report *os.File
	exited         chan struct{}
}

// startGuard starts a guard that waits for startCommand. It gives up when a context ends.
func startGuard(ctx, lease context.Context, command *exec.Cmd, env []string) (*guard, error) {
	self := "/proc/self/exe" // the same version, also after an update
	if runtime.GOOS != "linux" {
		var err error
		if self, err = os.Executable(); err != nil {
			return nil, err
		}
	}
	in, orders, errIn := os.Pipe()
	report, out, errOut := os.Pipe()
	if err := errors.Join(errIn, errOut); err != nil {
		return nil, err
	}
	g := &guard{exec.Command(self), orders, report, make(chan struct{})} //nolint:noctx // it ends with orders
	g.Args = []string{"fencelab", guardName}
	var err error
	for _, f := range []*os.File{in, out} { // ExtraFiles would replace descriptors that the command is to inherit
		_, failed := unix.FcntlInt(f.Fd(), unix.F_SETFD, 0)
		err = errors.Join(err, failed)
		g.Args = append(g.Args, strconv.Itoa(int(f.Fd())))
	}
	g.Args = append(append(g.Args, command.Path), command.Args...)
	g.Env, g.Stdin, g.Stdout, g.Stderr = env, os.Stdin, os.Stdout, os.Stderr
	g.SysProcAttr = &syscall.SysProcAttr{Setpgid: true}
	if err == nil {
		err = g.Start()
	}
	_, _ = in.Close(), out.Close()
	if err != nil {
		g.Close()
		return nil, err
	}
	go func() {
		_ = g.Wait()
		close(g.exited)
	}()
	kill := func() { _ = g.Process.Kill() }
	defer context.AfterFunc(ctx, kill)()
	defer context.AfterFunc(lease, kill)()
	if _, err := report.Read(make([]byte, 1)); err != nil { // it may not be signalled before
		g.Close()
		return nil, cmp.Or(context.Cause(ctx), context.Cause(lease), err)
	}
	return g, nil
}

// Close makes a guard kill what is left.
func (g *guard) Close() { _, _ = g.orders.Close(), g.report.Close() }

// signal signals the command's processes. It continues the guard if the command has stopped it with its group.
func (g *guard) signal(s syscall.Signal) {
	_, _ = g.orders.Write([]byte{byte(s)})
	_ = g.Process.Signal(syscall.SIGCONT)
}

// result returns the command's exit code, and errStillRuns unless the guard has reported the end of all its processes.
func (g *guard) result() (code int, left error) {
	if b, _ := io.ReadAll(g.report); len(b) == 0 {
		_ = syscall.Kill(-g.Process.Pid, syscall.SIGKILL)
		left = errStillRuns
	}
	if status := g.ProcessState.Sys().(syscall.WaitStatus); status.Signaled() {
		return exitSignal + int(status.Signal()), fmt.Errorf("its guard was killed, so perhaps %w", errStillRuns)
	}
	return g.ProcessState.ExitCode(), left
}

// runGuard runs the command with path args[2] and arguments args[3:]. args[0] and args[1] are descriptors.
func runGuard(args []string) error {
	if len(args) < 4 {
		return errors.New("it isn't for users: use exec")
	}
	var files [2]*os.File
	for i := range files {
		fd, err := strconv.Atoi(args[i])
		if err != nil {
			return err
		}
		syscall.CloseOnExec(fd)
		files[i] = os.NewFile(uintptr(fd), args[i])
	}
	orders, report := files[0], files[1]
	const maxSignal = 31
	for s := syscall.Signal(1); s <= maxSignal; s++ { // those to the group; signal.Ignore would reach the command
		if !signal.Ignored(s) && s != syscall.SIGTTIN && s != syscall.SIGTTOU { // Go doesn't report that these are ignored
			signal.Notify(make(chan os.Signal, 1), s)
		}
	}
	signals := make(chan syscall.Signal)
	go func() {
		defer close(signals)
		for b := make([]byte, 1); ; {
			if _, err := orders.Read(b); err != nil {
				return
			}
			signals <- syscall.Signal(b[0])
		}
	}()
	if _, err := report.Write([]byte("\n")); err != nil {
		return err
	}
	if _, ok := <-signals; !ok {
		return nil
	}
	allGone := func() { _, _ = report.Write([]byte("\n")) }
	tree, err := proc.StartTree(&exec.Cmd{Path: args[2], Args: args[3:], Stdin: os.Stdin, Stdout: os.Stdout, Stderr: os.Stderr})
	if err != nil {
		allGone()
		return exit(cannotRun(err), err)
	}
	for {
		select {
		case s, ok := <-signals:
			if !ok {
				tree.Kill(time.Second)
				return nil
			}
			tree.Signal(s)
		case status := <-tree.Exited():
			if tree.Kill(time.Second) {
				allGone()
			}
			if status.Signaled() {
				return exit(exitSignal+int(status.Signal()), nil)
			}
			return exit(status.ExitStatus(), nil)
		}
	}
}
