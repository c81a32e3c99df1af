package scenarios

import (
	"context"

	"github.com/fencelab/fencelab/faults"
	"github.com/fencelab/fencelab/resource"
	"github.com/fencelab/fencelab/scenarios/history"
)

// Watch returns the sync of a storeTarget on s.
func Watch(f history.Fencing, s resource.Store, key string, record func(history.Event)) func(context.Context, *history.Event) error {
	t := newStoreTarget(&Store{}, f, record)
	t.client, t.key = s, key
	return t.sync
}

// KillOf returns the kill of a storeTarget on s.
func KillOf(s resource.Store, key string, tell func(history.Event)) func(context.Context) error {
	t := newStoreTarget(&Store{Kill: func(context.Context) error { return nil }}, history.FencingOn, tell)
	t.client, t.key = s, key
	return t.kill
}

// Checked is l as a worker that outlives renewals uses it.
func Checked(l Lock) Lock { return checkedLock{l, &childSpec{Worker: Worker{Outlive: true}}} }

func InjectLink(ctx context.Context, verb string, l *faults.Link) (faults.Heal, error) {
	w := &worker{nodes: []Node{{Name: "server"}}, toLock: map[string]*faults.Link{"server": l}}
	return injections[verb].links(ctx, w, Step{})
}

// NoChild undoes a call of Child, until it is called again.
func NoChild() { childReady.Store(false) }

func OpenOwn(ctx context.Context, open OpenStore, s StoreSpec) (resource.Store, error) {
	return openOwn(ctx, open, s)
}

var (
	Through  = through
	TooEarly = tooEarly
)

func (s *Service) Check(sc *Scenario, f history.Fencing) error { return s.check(sc, f) }
