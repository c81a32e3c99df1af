package testbed

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"

	"github.com/fencelab/fencelab/faults"
)

const loopback = "127.0.0.1"

// processes are the hosts of a group of local processes.
type processes struct {
	group *group
	path  string
	all   []*process
}

// process is the host of one local process. Its ports and its directory stay its own while it is killed.
type process struct {
	name    string
	path    string
	ports   []int
	release []func() error
	dir     string // of the child, see spawn; holds the data directory too
	child   *child // nil before the first start
}

// newProcesses chooses the ports and makes the directories of g's servers.
func newProcesses(ctx context.Context, g *group) (_ hosts, err error) {
	path, err := g.find(g.programs[0])
	if err != nil {
		return nil, err
	}
	p := &processes{group: g, path: path}
	defer func() {
		if err != nil {
			for _, one := range p.all {
				err = errors.Join(err, one.remove(ctx))
			}
		}
	}()
	for _, name := range g.names {
		one := &process{name: name, path: path}
		p.all = append(p.all, one)
		for range g.ports {
			port, release, err := reservePort()
			if err != nil {
				return nil, err
			}
			one.ports = append(one.ports, port)
			one.release = append(one.release, release)
		}
		if one.dir, err = MkdirTemp(name); err != nil {
			return nil, err
		}
		if err := os.Mkdir(one.data(), 0o700); err != nil {
			return nil, fmt.Errorf("testbed: %w", err)
		}
	}
	return p, nil
}

func (p *processes) host(i int) host { return p.all[i] }

func (p *processes) place(i int) place {
	at := place{Provider: Local, Path: p.path, Dir: p.all[i].data(), Listen: loopback, Self: i}
	for _, one := range p.all {
		at.Peers = append(at.Peers, one.peer())
	}
	for _, s := range p.group.join {
		joined := s.host.(*process).peer()
		joined.Name = s.Name
		at.Joined = append(at.Joined, joined)
	}
	return at
}

func (p *processes) remove(context.Context) error { return nil }

func (p *process) peer() peer { return peer{Name: p.name, Host: loopback, Ports: p.ports} }

func (p *process) data() string { return filepath.Join(p.dir, "data") }

func (p *process) addrs(context.Context) ([]string, error) {
	return []string{fmt.Sprintf("%s:%d", loopback, p.ports[0])}, nil
}

func (p *process) pid() int { return p.child.PID }

func (p *process) start(_ context.Context, c command) error {
	for path, data := range c.Files {
		if err := os.WriteFile(path, data, 0o600); err != nil {
			return fmt.Errorf("testbed: %w", err)
		}
	}
	cmd := exec.Command(cmp.Or(c.Path, p.path)) //nolint:noctx // it outlives the context of its start; kill ends it
	cmd.Args = c.Args
	if len(c.Env) > 0 {
		cmd.Env = append(os.Environ(), c.Env...)
	}
	child, err := spawn(p.dir, cmd)
	if err != nil {
		return err
	}
	p.child = child
	return nil
}

func (p *process) once(ctx context.Context, c command) error {
	if err := p.start(ctx, c); err != nil {
		return err
	}
	select {
	case <-p.child.Exited():
		if err := p.child.Wait(); err != nil {
			return fmt.Errorf("%w: %s", err, p.child.log())
		}
		return nil
	case <-ctx.Done():
		return errors.Join(context.Cause(ctx), p.child.Kill())
	}
}

func (p *process) ended(context.Context) error {
	select {
	case <-p.child.Exited():
		log := p.child.log()
		err := fmt.Errorf("%s ended (%w): %s", p.path, p.child.Wait(), log)
		if strings.Contains(strings.ToLower(log), "address already in use") {
			err = fmt.Errorf("%w: %w", errBind, err)
		}
		return permanent{err}
	default:
		return nil
	}
}

// kill ends the process and all that it has started: a server's processes may be in groups of their own.
func (p *process) kill(ctx context.Context) error {
	if p.child == nil {
		return nil
	}
	select {
	case <-p.child.Exited():
		return nil // and its process id may be another's
	default:
	}
	under, err := descendants(p.child.PID)
	if err != nil {
		return err
	}
	if err := p.child.Kill(); err != nil {
		return fmt.Errorf("testbed: %w", err)
	}
	for _, pid := range under {
		if err := faults.Kill(ctx, pid); err != nil && !errors.Is(err, os.ErrProcessDone) {
			return err
		}
	}
	return nil
}

// pause freezes the process and all that it has started. Those that run under a frozen parent start no others that
// the next look would miss.
func (p *process) pause(ctx context.Context) (faults.Heal, error) {
	var heals []faults.Heal
	heal := func(ctx context.Context) error {
		for i, heal := range heals {
			if err := heal(ctx); err != nil && (i == 0 || !errors.Is(err, os.ErrProcessDone)) {
				return err
			}
		}
		return nil
	}
	frozen := make(map[int]bool)
	for pids := []int{p.child.PID}; len(pids) > 0; {
		for _, pid := range pids {
			one, err := faults.Pause(ctx, pid)
			if errors.Is(err, os.ErrProcessDone) && len(heals) > 0 {
				frozen[pid] = true // it isn't, but it won't run again
				continue
			}
			if err != nil {
				return nil, errors.Join(err, heal(context.WithoutCancel(ctx)))
			}
			frozen[pid] = true
			heals = append(heals, one)
		}
		under, err := descendants(p.child.PID)
		if err != nil {
			return nil, errors.Join(err, heal(context.WithoutCancel(ctx)))
		}
		pids = pids[:0]
		for _, pid := range under {
			if !frozen[pid] {
				pids = append(pids, pid)
			}
		}
	}
	return heal, nil
}

func (p *process) wipe(context.Context) error {
	if err := os.RemoveAll(p.data()); err != nil {
		return fmt.Errorf("testbed: %w", err)
	}
	if err := os.Mkdir(p.data(), 0o700); err != nil {
		return fmt.Errorf("testbed: %w", err)
	}
	return nil
}

// remove kills the process: a server that holds nothing worth keeping needs no goodbye.
func (p *process) remove(ctx context.Context) error {
	err := p.kill(context.WithoutCancel(ctx))
	if p.dir != "" && err == nil {
		if rmErr := os.RemoveAll(p.dir); rmErr != nil {
			err = fmt.Errorf("testbed: %w", rmErr)
		}
	}
	for _, release := range p.release {
		err = errors.Join(err, release())
	}
	p.release = nil
	return err
}

// descendants returns the processes that pid has started and those that they have, as long as their parents live.
func descendants(pid int) ([]int, error) {
	children, err := children()
	if err != nil {
		return nil, err
	}
	var found []int
	for next := children[pid]; len(next) > 0; next = next[1:] {
		found = append(found, next[0])
		next = append(next, children[next[0]]...)
	}
	return found, nil
}
