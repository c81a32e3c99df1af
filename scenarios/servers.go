package scenarios

import (
	"context"
	"errors"
	"fmt"
	"os"
	"strings"

	"github.com/fencelab/fencelab/faults"
	"github.com/fencelab/fencelab/scenarios/testbed"
)

// ServerSet is the servers of a lock and their faults.
type ServerSet struct {
	Lock    string // Service.Lock
	Servers []*testbed.Server
	// Faults are faults of this lock's servers only, by name.
	Faults map[string]func(ctx context.Context, s *testbed.Server, st Step) error
}

// On returns the service on these servers. External servers have no faults.
func (s ServerSet) On() *Service {
	svc := &Service{Lock: s.Lock, Server: s.Servers[0].String()}
	for _, server := range s.Servers {
		addr := server.Addr
		if strings.Contains(server.URL, "://") {
			addr = server.URL
		}
		svc.Nodes = append(svc.Nodes, Node{server.Name, addr})
	}
	if n := len(s.Servers); n > 1 {
		svc.Server = fmt.Sprintf("%d × %s", n, svc.Server)
	}
	svc.Fault = (&faultInjector{ServerSet: s, leaders: map[string]string{}, undo: map[string]faults.Heal{}}).step
	return svc
}

// Close closes the servers.
func (s ServerSet) Close() error {
	var errs []error
	for _, server := range s.Servers {
		errs = append(errs, server.Close())
	}
	return errors.Join(errs...)
}

type faultInjector struct {
	ServerSet
	leaders map[string]string // by undo: the server that the last such fault of Leader hit
	undo    map[string]faults.Heal
}

func (f *faultInjector) step(ctx context.Context, st Step) error {
	name := st.Target
	if name == Leader {
		var err error
		if name, err = f.findLeader(ctx, st); err != nil {
			return err
		}
	}
	var errs []error
	var begun []*testbed.Server
	for _, s := range f.Servers {
		if st.Target != LockService && s.Name != name {
			continue
		}
		key := fault(st.Verb).Undo + " " + s.Name
		before := f.undo[key] != nil
		err := f.apply(ctx, s, st)
		if !before && f.undo[key] != nil {
			begun = append(begun, s)
		}
		if err == nil {
			continue
		}
		errs = append(errs, fmt.Errorf("%s: %w", s.Name, err))
		if undone(st.Verb) == nil { // a fault of several servers is in force on all or on none
			return errors.Join(append(errs, f.undoAll(ctx, begun, fault(st.Verb).Undo))...)
		}
	}
	return errors.Join(errs...)
}

func (f *faultInjector) undoAll(ctx context.Context, servers []*testbed.Server, verb string) error {
	ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), DefaultStepTimeout)
	defer cancel()
	var errs []error
	for _, s := range servers {
		errs = append(errs, f.apply(ctx, s, Step{Verb: verb, Target: s.Name}))
		delete(f.undo, verb+" "+s.Name)
	}
	return errors.Join(errs...)
}

// findLeader finds the leader for each fault: several runs may use the service. An undo goes to the server that was hit.
func (f *faultInjector) findLeader(ctx context.Context, st Step) (name string, err error) {
	if undone(st.Verb) != nil {
		if name = f.leaders[st.Verb]; name == "" {
			return "", fmt.Errorf("there is no fault for %s to undo", st.Verb)
		}
		return name, nil
	}
	s, err := f.Servers[0].Cluster.Leader(ctx)
	if err != nil {
		return "", err
	}
	f.leaders[fault(st.Verb).Undo] = s.Name
	return s.Name, nil
}

func (f *faultInjector) apply(ctx context.Context, s *testbed.Server, st Step) error {
	if s.Provider == testbed.External { // its data may matter
		return fmt.Errorf("it belongs to the user and must not be broken: %w", errors.ErrUnsupported)
	}
	if undone(st.Verb) != nil {
		undo := f.undo[st.Verb+" "+s.Name]
		if undo == nil {
			return fmt.Errorf("there is no fault for %s to undo", st.Verb)
		}
		err := undo(ctx)
		if err == nil || errors.Is(err, os.ErrProcessDone) { // a killed server is no longer paused
			delete(f.undo, st.Verb+" "+s.Name)
		}
		return err
	}
	if do := f.Faults[st.Verb]; do != nil {
		return do(ctx, s, st)
	}
	do, before := injections[st.Verb].server, fault(st.Verb).Undo+" "+s.Name
	switch {
	case do == nil:
		return fmt.Errorf("it has no fault %q: %w", st.Verb, errors.ErrUnsupported)
	case f.undo[before] != nil:
		return fmt.Errorf("%s is already in force: add %s first", st.Verb, before)
	}
	undo, err := do(ctx, s, st)
	if undo != nil && fault(st.Verb).Undo != "" { // it may be in force in spite of err
		f.undo[before] = undo
	}
	return err
}
