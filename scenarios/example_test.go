package scenarios_test

import (
	"context"
	"errors"
	"fmt"
	"path/filepath"
	"strings"

	"github.com/fencelab/fencelab/internal/open"
	"github.com/fencelab/fencelab/resource"
	"github.com/fencelab/fencelab/resource/boltstore"
	"github.com/fencelab/fencelab/scenarios"
	"github.com/fencelab/fencelab/scenarios/history"
)

// Your own lock and store: any [scenarios.Lock] and any [resource.Store].
func ExampleChildWithStore() {
	openStore := func(_ context.Context, s scenarios.StoreSpec) (resource.Store, error) {
		return boltstore.Open(filepath.Join(s.Dir, "mine.db"), nil) // your store
	}
	// First in TestMain or main: workers and the resource are this binary, started again.
	scenarios.ChildWithStore(open.Lock, openStore)

	// In a test:
	hazard, _ := scenarios.Hazard("ResourceCrash")
	r := scenarios.Runner{
		Service: &scenarios.Service{Lock: "redis", Nodes: []scenarios.Node{{Name: "redis", Addr: "127.0.0.1:6379"}}},
		Store:   &scenarios.Store{Name: "mine", Open: openStore},
	}
	for fencing, want := range hazard.Expect {
		got, err := r.Run(context.Background(), hazard, fencing)
		switch {
		case errors.Is(err, errors.ErrUnsupported):
			continue // not applicable to this lock or this store
		case err != nil:
			fmt.Println(err)
		case got.Verdict != want:
			fmt.Printf("fencing %s: %v, want %v: %q\n", fencing, got.Verdict, want, got.Findings)
			fmt.Println(strings.Join(history.Trace(got.Events), "\n")) // one line per event
		}
	}
}
