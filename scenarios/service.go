package scenarios

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"net"
	"net/url"
	"slices"
	"strings"
	"time"

	"github.com/fencelab/fencelab/faults"
	"github.com/fencelab/fencelab/scenarios/history"
)

// Service is the lock service that workers use, as the runner sees it.
type Service struct {
	Lock   string // the lock's name, in histories and for Open
	Server string // what serves it, e.g. "redis 7.0.15 (containers)"
	Nodes  []Node // where a worker that is started now finds it, and what it can be cut off from
	// MinSession is the shortest session that it allows, where that isn't the usual one; see LockSpec.
	MinSession time.Duration
	// NoRenew says that the lock doesn't renew leases, so that hazards that end its renewals show nothing.
	NoRenew bool
	// NoTokens says that the lock has no fencing tokens, so that there is nothing to run with fencing on.
	NoTokens bool
	// Env are variables that workers get beside those of this process: "GORACE=exitcode=0", say.
	Env []string
	// Forget, if not nil, removes from the servers what the lock of key has left there.
	Forget func(ctx context.Context, key string) error
	// Fault carries out a step of the schedule that hits a server, and returns when it has happened. An error that matches
	// errors.ErrUnsupported says that this service can't have it. It may change Nodes. Nil: no fault can be had.
	Fault func(ctx context.Context, st Step) error
}

// Node is one server of a lock service.
type Node struct {
	Name string // in schedules: "redis3"
	Addr string // host:port, or a URL with one
}

// Link makes a link to the node, for one client alone, and returns the address at which that client finds the node over it.
func (n Node) Link() (l *faults.Link, addr string, err error) {
	upstream, err := hostPort(n.Addr)
	if err != nil {
		return nil, "", err
	}
	if l, err = faults.NewLink(upstream); err != nil {
		return nil, "", err
	}
	if addr, err = through(n.Addr, l.Addr()); err != nil {
		return nil, "", errors.Join(err, l.Close())
	}
	return l, addr, nil
}

func (s *Service) fault(ctx context.Context, st Step) error {
	if s.Fault == nil {
		return fmt.Errorf("%s has no faults: %w", s.Server, errors.ErrUnsupported)
	}
	return s.Fault(ctx, st)
}

// check returns an error if s can't be the service of sc in a fencing mode.
func (s *Service) check(sc *Scenario, f history.Fencing) error {
	if s.NoTokens && f != history.FencingOff {
		return fmt.Errorf("scenarios: scenario %q: %s has no tokens, and with fencing %s each grant needs one: %w",
			sc.Name, cmp.Or(s.Server, s.Lock), f, errors.ErrUnsupported)
	}
	if !sc.On(s.Lock) {
		return fmt.Errorf("scenarios: scenario %q is about other locks than %q: %s", sc.Name, s.Lock, strings.Join(sc.Locks, ", "))
	}
	for _, name := range slices.Sorted(maps.Keys(sc.Workers)) {
		if w := sc.Workers[name]; s.NoRenew && (w.MaxHold > 0 || w.Outlive && !w.NoRenew) {
			return fmt.Errorf("scenarios: scenario %q: worker %s is to lose a lease that is renewed, and %s renews none: %w",
				sc.Name, name, cmp.Or(s.Server, s.Lock), errors.ErrUnsupported)
		}
	}
	for i, st := range sc.Steps {
		if fault(st.Verb).From && len(s.Nodes) == 0 {
			return fmt.Errorf("scenarios: scenario %q: step %d, %s: %s has no Nodes to be cut off from: %w",
				sc.Name, i+1, st, cmp.Or(s.Server, s.Lock), errors.ErrUnsupported)
		}
		names := st.From
		if sc.kind(st.Target) == ofServer {
			names = []string{st.Target}
		}
		for _, name := range names {
			if name != Leader && name != LockService && !slices.ContainsFunc(s.Nodes, func(n Node) bool { return n.Name == name }) {
				return fmt.Errorf("scenarios: scenario %q: step %d, %s: %s has no server %q", sc.Name, i+1, st, s.Server, name)
			}
		}
	}
	return nil
}

// hostPort is where addr is to be connected to.
func hostPort(addr string) (string, error) {
	if !strings.Contains(addr, "://") {
		return addr, nil
	}
	u, err := url.Parse(addr)
	if err != nil {
		return "", errors.New("scenarios: the server's address is no URL") // it may hold a password
	}
	if u.Port() == "" {
		return "", fmt.Errorf("scenarios: the server's address has no port: %s", u.Redacted())
	}
	return u.Host, nil
}

// through is addr with another host and port.
func through(addr, hostPort string) (string, error) {
	if !strings.Contains(addr, "://") {
		return hostPort, nil
	}
	u, err := url.Parse(addr)
	if err != nil {
		return "", errors.New("scenarios: the server's address is no URL")
	}
	if _, _, err := net.SplitHostPort(hostPort); err != nil {
		return "", fmt.Errorf("scenarios: %w", err)
	}
	u.Host = hostPort
	return u.String(), nil
}
