package testbed

import (
	"bytes"
	"cmp"
	"context"
	"errors"
	"fmt"
	"net"
	"os"
	"os/exec"
	"path/filepath"
	"strconv"
	"sync"
	"syscall"

	"github.com/fencelab/fencelab/faults"
	"github.com/fencelab/fencelab/internal/proc"
)

const loopback = "127.0.0.1"

// process is the host of one local process.
type process struct {
	path    string
	ports   []int
	release []func() error
	dir     string      // holds the data directory, log and process id
	child   *proc.Child // nil before the first start
}

func newProcesses(ctx context.Context, g *group, _ *Options) (all []host, removeShared func() error, err error) {
	path, err := g.find(g.program)
	if err != nil {
		return nil, nil, err
	}
	defer func() {
		if err != nil {
			for _, one := range all {
				err = errors.Join(err, one.remove(ctx))
			}
		}
	}()
	for _, name := range g.names {
		one := &process{path: path}
		all = append(all, one)
		for range g.ports {
			port, release, err := proc.ReservePort()
			if err != nil {
				return all, nil, err
			}
			one.ports = append(one.ports, port)
			one.release = append(one.release, release)
		}
		if one.dir, err = MkdirTemp(name); err != nil {
			return all, nil, err
		}
		if err := os.Mkdir(one.data(), 0o700); err != nil {
			return all, nil, err
		}
	}
	return all, nil, nil
}

func (p *process) placement() placement {
	return placement{Provider: Local, Path: p.path, Dir: p.data(), Listen: loopback}
}

func (p *process) peer(name string) peer { return peer{Name: name, Host: loopback, Ports: p.ports} }
func (p *process) data() string          { return filepath.Join(p.dir, "data") }

func (p *process) addr() string { return net.JoinHostPort(loopback, strconv.Itoa(p.ports[0])) }

func (p *process) start(_ context.Context, c command) error {
	for path, data := range c.Files {
		if err := os.WriteFile(path, data, 0o600); err != nil {
			return err
		}
	}
	log, err := os.Create(p.logFile())
	if err != nil {
		return err
	}
	defer func() { _ = log.Close() }()          // the child has its own descriptor
	cmd := exec.Command(cmp.Or(c.Path, p.path)) //nolint:noctx // it outlives the context of its start; kill ends it
	cmd.Args, cmd.Dir, cmd.Stdout, cmd.Stderr = c.Args, p.dir, log, log
	cmd.Env = append(os.Environ(), c.Env...)
	var written sync.Mutex // the file must be removed after it is written, or the watchdog would kill a reused process id
	written.Lock()
	child, err := proc.Start(cmd, func() {
		written.Lock()
		defer written.Unlock()
		_ = os.Remove(p.childFile())
	})
	if err == nil {
		err = os.WriteFile(p.childFile(), []byte(strconv.Itoa(child.PID)), 0o600)
	}
	written.Unlock()
	if err != nil {
		if child != nil {
			err = errors.Join(err, child.Kill())
		}
		return err
	}
	p.child = child
	return nil
}

func (p *process) runOnce(ctx context.Context, c command) error {
	if err := p.start(ctx, c); err != nil {
		return err
	}
	select {
	case <-p.child.Exited():
		if p.child.Wait() != nil {
			return p.exitError(ctx)
		}
		return nil
	case <-ctx.Done():
		return errors.Join(context.Cause(ctx), p.child.Kill())
	}
}

func (p *process) logFile() string   { return filepath.Join(p.dir, "log") }
func (p *process) childFile() string { return filepath.Join(p.dir, childFile) }

func (p *process) exitError(context.Context) error {
	select {
	case <-p.child.Exited():
	default:
		return nil
	}
	log, err := os.ReadFile(p.logFile())
	err = errors.Join(fmt.Errorf("%s ended (%w): %s", p.path, p.child.Wait(), tail(log)), err)
	return permanent{err}
}

func tail(b []byte) string {
	b = bytes.TrimSpace(b)
	return string(b[max(0, len(b)-2000):])
}

// kill also kills descendants in other process groups.
func (p *process) kill(ctx context.Context) error {
	if p.child == nil {
		return nil
	}
	err := p.child.With(func(pid int) error {
		if err := syscall.Kill(pid, syscall.SIGSTOP); err != nil { // it reaps no children then, so their pids aren't used again
			return err
		}
		under, err := proc.Descendants(pid)
		for _, one := range under {
			if err := faults.Kill(ctx, one.PID); err != nil && !errors.Is(err, os.ErrProcessDone) {
				return err
			}
		}
		return err
	})
	if errors.Is(err, os.ErrProcessDone) {
		err = nil
	}
	return errors.Join(err, p.child.Kill())
}

func (p *process) pause(ctx context.Context) (heal faults.Heal, err error) {
	err = p.child.With(func(pid int) (err error) {
		heal, err = pauseTree(ctx, pid)
		return err
	})
	return heal, err
}

// pauseTree freezes parents first: a frozen one starts no others.
func pauseTree(ctx context.Context, root int) (faults.Heal, error) {
	var heals []faults.Heal
	heal := func(ctx context.Context) error {
		for i, heal := range heals {
			if err := heal(ctx); err != nil && (i == 0 || !errors.Is(err, os.ErrProcessDone)) {
				return err
			}
		}
		return nil
	}
	seen := make(map[int]bool)
	for pids := []int{root}; len(pids) > 0; {
		pid := pids[0]
		pids = pids[1:]
		if seen[pid] {
			continue
		}
		seen[pid] = true
		one, err := faults.Pause(ctx, pid)
		if err == nil {
			heals = append(heals, one)
		}
		if err == nil || errors.Is(err, os.ErrProcessDone) && len(heals) > 0 { // a descendant may end
			var under []proc.Process
			under, err = proc.Descendants(root)
			for _, one := range under {
				pids = append(pids, one.PID)
			}
		}
		if err != nil {
			return nil, errors.Join(err, heal(context.WithoutCancel(ctx)))
		}
	}
	return heal, nil
}

func (p *process) wipe(context.Context) error {
	return errors.Join(os.RemoveAll(p.data()), os.Mkdir(p.data(), 0o700))
}

func (p *process) remove(ctx context.Context) error {
	err := p.kill(context.WithoutCancel(ctx))
	if p.dir != "" && err == nil {
		err = os.RemoveAll(p.dir)
	}
	for _, release := range p.release {
		err = errors.Join(err, release())
	}
	p.release = nil
	return err
}
