package scenarios

import (
	"context"

	"github.com/fencelab/fencelab/resource"
	"github.com/fencelab/fencelab/scenarios/history"
)

// Watch returns what a Runner does before it appends a worker's report: it looks at s, and tells what has been decided.
func Watch(f history.Fencing, s resource.Store, key string, tell func(history.Event)) func(context.Context, *history.Event) error {
	t := newStoreTarget(&Store{}, f, tell)
	t.client, t.key = s, key
	return t.sync
}

// ChildEnv is the variable that tells a process that it is a child.
const ChildEnv = childEnv

// OpenOwn opens the user's store in a child.
func OpenOwn(ctx context.Context, open OpenStore, s StoreSpec) (resource.Store, error) {
	return openOwn(ctx, open, s)
}

// Check returns an error if s can't be the service of sc in a fencing mode.
func (s *Service) Check(sc *Scenario, f history.Fencing) error { return s.check(sc, f) }
