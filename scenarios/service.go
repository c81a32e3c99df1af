package scenarios

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"maps"
	"net/url"
	"slices"
	"strings"
	"time"

	"github.com/fencelab/fencelab/faults"
	"github.com/fencelab/fencelab/scenarios/history"
)

// Service is the lock service under test.
type Service struct {
	Lock   string
	Server string // e.g. "redis 7.0.15 (containers)"
	Nodes  []Node
	// MinSession is as in LockSpec.
	MinSession time.Duration
	// NoRenew says that leases aren't renewed: hazards that end renewals don't apply.
	NoRenew bool
	// NoTokens says that the lock has no fencing tokens: fencing must be off.
	NoTokens bool
	// Reentrant says that a client which holds a lock gets it again.
	Reentrant bool
	// Env has additional environment variables for workers.
	Env []string
	// Forget, if not nil, removes the lock of key from the servers, even if held, but no other key and no session. It may be
	// called while other keys are used.
	Forget func(ctx context.Context, key string) error
	// Fault does a step that affects a server, and may change Nodes. For an unsupported fault the error matches
	// errors.ErrUnsupported. Nil: all are unsupported.
	Fault func(ctx context.Context, st Step) error
}

// Node is one server of a lock service.
type Node struct {
	Name string // in schedules: "redis3"
	Addr string // host:port, or a URL with one
}

// Link makes a link to the node for one client, and returns the node's address through it.
func (n Node) Link() (l *faults.Link, addr string, err error) {
	upstream, err := hostPort(n.Addr)
	if err != nil {
		return nil, "", err
	}
	if l, err = faults.NewLink(upstream); err != nil {
		return nil, "", err
	}
	return l, through(n.Addr, l.Addr()), nil
}

func (s *Service) fault(ctx context.Context, st Step) error {
	if s.Fault == nil {
		return fmt.Errorf("%s has no faults: %w", s.Server, errors.ErrUnsupported)
	}
	return s.Fault(ctx, st)
}

func (s *Service) check(sc *Scenario, f history.Fencing) error {
	if s.NoTokens && f != history.FencingOff {
		return fmt.Errorf("scenarios: scenario %q: %s has no tokens, and with fencing %s each grant needs one: %w",
			sc.Name, s.Lock, f, errors.ErrUnsupported)
	}
	if !sc.On(s.Lock) {
		return fmt.Errorf("scenarios: scenario %q doesn't apply to the lock %q, only to %s: %w",
			sc.Name, s.Lock, strings.Join(sc.Locks, ", "), errors.ErrUnsupported)
	}
	for _, name := range slices.Sorted(maps.Keys(sc.Workers)) {
		if w := sc.Workers[name]; s.NoRenew && (w.MaxHold > 0 || w.Outlive && !w.NoRenew) {
			return fmt.Errorf("scenarios: scenario %q: worker %s must lose a lease that is renewed, but %s doesn't renew leases: %w",
				sc.Name, name, s.Lock, errors.ErrUnsupported)
		}
	}
	for i, st := range sc.Steps {
		if fault(st.Verb).From && len(s.Nodes) == 0 {
			return fmt.Errorf("scenarios: %s: step %d, %s: %s has no Nodes to be cut off from: %w",
				sc.where(st.line), i+1, st, cmp.Or(s.Server, s.Lock), errors.ErrUnsupported)
		}
		names := st.From // one by one: a link is to one server
		if sc.kind(st.Target) == ofServer && st.Target != Leader && st.Target != LockService {
			names = []string{st.Target}
		}
		for _, name := range names {
			if !slices.ContainsFunc(s.Nodes, func(n Node) bool { return n.Name == name }) {
				return fmt.Errorf("scenarios: %s: step %d, %s: %s has no server %q", sc.where(st.line), i+1, st, s.Server, name)
			}
		}
	}
	return nil
}

func hostPort(addr string) (string, error) {
	if !strings.Contains(addr, "://") {
		return addr, nil
	}
	u, err := url.Parse(addr)
	if err != nil {
		return "", errors.New("scenarios: the server's address is not a URL") // it may contain a password
	}
	if u.Port() == "" {
		return "", fmt.Errorf("scenarios: the server's address has no port: %s", u.Host) // the rest may contain a password
	}
	return u.Host, nil
}

func through(addr, link string) string {
	u, err := url.Parse(addr)
	if err != nil || !strings.Contains(addr, "://") {
		return link
	}
	u.Host = link
	return u.String()
}
