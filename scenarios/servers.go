package scenarios

import (
	"context"
	"errors"
	"fmt"
	"strings"
	"time"

	"github.com/fencelab/fencelab/faults"
	"github.com/fencelab/fencelab/scenarios/history"
	"github.com/fencelab/fencelab/scenarios/testbed"
)

// ServerSet is what a lock runs on, and what can be done to them.
type ServerSet struct {
	Lock    string // the Service's
	Servers []*testbed.Server

	Cluster *testbed.Cluster // of which Servers are the members; for the target Leader and the fault isolate
	// Inject does faults that take more than control of a server's process, such as a command to it. Nil: there are none.
	// For one that it doesn't know it returns [NoFault].
	Inject func(ctx context.Context, s *testbed.Server, st Step) error
}

// NoFault is the error that says that nothing does a step's fault.
func NoFault(st Step) error {
	return fmt.Errorf("there is no fault %q: %w", st.Fault, errors.ErrUnsupported)
}

// On is the service of servers that run for this process. One that is the user's can have no fault.
func (s ServerSet) On() *Service {
	names := make([]string, len(s.Servers))
	svc := &Service{Lock: s.Lock}
	for i, server := range s.Servers {
		names[i] = server.String()
		addr := server.Addr
		if strings.Contains(server.URL, "://") {
			addr = server.URL
		}
		svc.Nodes = append(svc.Nodes, Node{server.Name, addr})
	}
	svc.Server = names[0]
	if len(names) > 1 {
		svc.Server = fmt.Sprintf("%d × %s", len(names), names[0])
	}
	in := &inForce{ServerSet: s, heals: map[string]faults.Heal{}}
	svc.Fault = in.fault
	return svc
}

// Close ends the servers.
func (s ServerSet) Close() error {
	if s.Cluster != nil {
		return s.Cluster.Close()
	}
	var errs []error
	for _, server := range s.Servers {
		errs = append(errs, server.Close())
	}
	return errors.Join(errs...)
}

// inForce does the faults of a ServerSet, and ends them.
type inForce struct {
	ServerSet
	leader string                 // the server that led when a fault hit the leader last
	heals  map[string]faults.Heal // what ends a pause or an isolation, by server
}

func (f *inForce) fault(ctx context.Context, st Step) error {
	name := st.Target
	if name == Leader {
		if err := f.findLeader(ctx, st.Fault); err != nil {
			return err
		}
		name = f.leader
	}
	for _, s := range f.Servers {
		if st.Target != LockService && s.Name != name {
			continue
		}
		if err := f.one(ctx, s, st); err != nil {
			return fmt.Errorf("%s: %w", s.Name, err)
		}
	}
	return nil
}

// findLeader finds out who leads, for each fault anew, and in a later run too: what is done to the leader is undone to the
// same server.
func (f *inForce) findLeader(ctx context.Context, fault string) error {
	undoes := fault == history.FaultResume || fault == history.FaultRejoin || fault == history.FaultRestart
	switch {
	case f.Cluster == nil:
		return fmt.Errorf("it has no leader: %w", errors.ErrUnsupported)
	case undoes && f.leader == "":
		return fmt.Errorf("there is nothing that %s would end", fault)
	case undoes:
		return nil
	}
	s, err := f.Cluster.Leader(ctx)
	if err == nil {
		f.leader = s.Name
	}
	return err
}

func (f *inForce) one(ctx context.Context, s *testbed.Server, st Step) error {
	if s.Provider == testbed.External { // not its data either, to which an address is enough
		return fmt.Errorf("it is the user's, and not to be broken: %w", errors.ErrUnsupported)
	}
	switch st.Fault {
	case history.FaultPause:
		return f.begin(s, func() (faults.Heal, error) { return s.Pause(ctx) })
	case history.FaultIsolate:
		if f.Cluster == nil {
			return fmt.Errorf("it has no peers: %w", errors.ErrUnsupported)
		}
		return f.begin(s, func() (faults.Heal, error) {
			return f.Cluster.Isolate(ctx, s)
		})
	case history.FaultResume, history.FaultRejoin:
		heal := f.heals[s.Name]
		if heal == nil {
			return fmt.Errorf("there is nothing that %s would end", st.Fault)
		}
		delete(f.heals, s.Name)
		return heal(ctx)
	case history.FaultKill:
		return s.Kill(ctx)
	case history.FaultRestart:
		return s.Restart(ctx, testbed.RestartOptions{})
	case history.FaultWipe:
		if err := s.Kill(ctx); err != nil {
			return err
		}
		return s.Restart(ctx, testbed.RestartOptions{Wipe: true})
	case history.FaultJump:
		return f.jump(ctx, s, st.Detail)
	}
	if f.Inject == nil {
		return NoFault(st)
	}
	return f.Inject(ctx, s, st)
}

func (f *inForce) begin(s *testbed.Server, inject func() (faults.Heal, error)) error {
	if f.heals[s.Name] != nil {
		return errors.New("it is paused or isolated already")
	}
	heal, err := inject()
	if err == nil {
		f.heals[s.Name] = heal
	}
	return err
}

func (f *inForce) jump(ctx context.Context, s *testbed.Server, detail string) error {
	d, err := time.ParseDuration(detail)
	if err != nil {
		return fmt.Errorf("a jump's detail is how far, as in \"20s\": %w", err)
	}
	if s.Clock == nil {
		return fmt.Errorf("its clock is the machine's: %w", errors.ErrUnsupported)
	}
	_, err = s.Clock.Jump(ctx, d)
	return err
}
