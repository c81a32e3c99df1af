package scenarios

import (
	"context"

	"github.com/fencelab/fencelab/internal/stores"
	"github.com/fencelab/fencelab/resource"
	"github.com/fencelab/fencelab/scenarios/history"
)

// Watch returns what a Runner does before it appends a worker's report: it looks at s, and tells what has been decided.
func Watch(f history.Fencing, s resource.Store, key string, tell func(history.Event)) func(context.Context, *history.Event) error {
	t := newStoreTarget(&Store{}, f, tell)
	t.client, t.key = &stores.Store{Store: s}, key
	return t.sync
}
