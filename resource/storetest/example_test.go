package storetest_test

import (
	"context"
	"fmt"

	"github.com/fencelab/fencelab/resource"
	"github.com/fencelab/fencelab/resource/storetest"
)

type lenient struct{ *resource.Memory }

func (s lenient) ReadFenced(ctx context.Context, key string, _ resource.Fence) (resource.Record, error) {
	return s.Read(ctx, key)
}

// A test calls Run. Check runs a single case, here on a flawed store.
func ExampleCase_Check() {
	kit := storetest.Harness{New: func() (resource.Store, error) { return lenient{resource.NewMemory()}, nil }}
	for _, c := range storetest.Cases() {
		if c.Name == "FencedReadRefused" {
			fmt.Println(c.Check(context.Background(), kit))
		}
	}
	// Output: ReadFenced by 4.0: got no error, want resource: stale fencing token for "k": seen 5, got 4
}
