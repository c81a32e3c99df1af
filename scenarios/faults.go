package scenarios

import (
	"context"
	"errors"
	"fmt"
	"slices"
	"time"

	"github.com/fencelab/fencelab/faults"
	"github.com/fencelab/fencelab/scenarios/history"
	"github.com/fencelab/fencelab/scenarios/testbed"
)

// injection injects a fault and returns its undo, if any, once the fault is in force. Nil: there is no such fault.
type injection struct {
	process  func(ctx context.Context, w *worker) (faults.Heal, error)
	links    func(ctx context.Context, w *worker, st Step) (faults.Heal, error)
	resource func(ctx context.Context, r target) (faults.Heal, error)
	server   func(ctx context.Context, s *testbed.Server, st Step) (faults.Heal, error)
}

// injections has [history.Faults], except those that only certain locks' servers have: see [ServerSet].
var injections = map[string]injection{
	"pause": {
		process: func(ctx context.Context, w *worker) (heal faults.Heal, err error) {
			err = w.With(func(pid int) (err error) {
				heal, err = faults.Pause(ctx, pid)
				return err
			})
			return heal, err
		},
		server: func(ctx context.Context, s *testbed.Server, _ Step) (faults.Heal, error) {
			return s.Pause(ctx)
		},
	},
	"kill": {
		process: func(ctx context.Context, w *worker) (faults.Heal, error) { // at a checkpoint, with all reports sent
			if err := w.With(func(pid int) error { return faults.Kill(ctx, pid) }); err != nil {
				return nil, err
			}
			_, err := w.end()
			return nil, err
		},
		resource: func(ctx context.Context, r target) (faults.Heal, error) { return r.restart, r.kill(ctx) },
		server: func(ctx context.Context, s *testbed.Server, _ Step) (faults.Heal, error) {
			return s.Restart, s.Kill(ctx)
		},
	},
	"hold":   {links: func(ctx context.Context, w *worker, _ Step) (faults.Heal, error) { return w.toStore.HoldRequests(ctx) }},
	"cut":    {links: lockLinks((*faults.Link).Cut)},
	"refuse": {links: lockLinks((*faults.Link).Refuse)},
	"isolate": {server: func(ctx context.Context, s *testbed.Server, _ Step) (faults.Heal, error) {
		return s.Cluster.Isolate(ctx, s)
	}},
	"wipe": {server: func(ctx context.Context, s *testbed.Server, _ Step) (faults.Heal, error) {
		return nil, s.Wipe(ctx)
	}},
	"jump": {server: func(ctx context.Context, s *testbed.Server, st Step) (faults.Heal, error) {
		d, err := time.ParseDuration(st.Detail)
		if err != nil {
			return nil, fmt.Errorf("a jump needs a duration, such as 20s: %w", err)
		}
		if s.Clock == nil {
			return nil, fmt.Errorf("its clock is the machine's: %w", errors.ErrUnsupported)
		}
		return s.Clock.Jump(ctx, d)
	}},
	"deny": {server: func(ctx context.Context, s *testbed.Server, _ Step) (faults.Heal, error) {
		return s.Deny(ctx)
	}},
}

func lockLinks(fault func(*faults.Link, context.Context) (faults.Heal, error)) func(context.Context, *worker, Step) (faults.Heal, error) {
	return func(ctx context.Context, w *worker, st Step) (faults.Heal, error) {
		var all heals
		for _, n := range w.nodes {
			if len(st.From) > 0 && !slices.Contains(st.From, n.Name) {
				continue
			}
			heal, err := fault(w.toLock[n.Name], ctx)
			if err != nil {
				return nil, fmt.Errorf("%s: %w", n.Name, err)
			}
			all = append(all, heal)
		}
		return all.heal, nil
	}
}

type heals []faults.Heal

func (h heals) heal(ctx context.Context) error {
	for _, heal := range h {
		if err := heal(ctx); err != nil {
			return err
		}
	}
	return nil
}

type kind string

const (
	ofWorker   kind = "a worker"
	ofResource kind = "the resource"
	ofServer   kind = "a lock server"
)

func verbs(k kind) (names []string) {
	for _, f := range history.Faults {
		if len(undone(f.Name)) > 0 {
			continue
		}
		e, known := injections[f.Name]
		if k == ofWorker && (e.process != nil || e.links != nil) || k == ofResource && e.resource != nil || k == ofServer && (e.server != nil || !known) {
			names = append(names, f.Name)
			permanent := k == ofWorker && f.State == history.Down
			if f.Undo != "" && !permanent && !slices.Contains(names, f.Undo) {
				names = append(names, f.Undo)
			}
		}
	}
	return names
}
