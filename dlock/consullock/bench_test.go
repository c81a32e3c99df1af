package consullock_test

import (
	"context"
	"strconv"
	"testing"

	"github.com/hashicorp/consul/api"

	"github.com/fencelab/fencelab/dlock"
	"github.com/fencelab/fencelab/dlock/internal/locktest"
)

// BenchmarkPair compares with one write, half of what a lock and an unlock need.
func BenchmarkPair(b *testing.B) {
	raw, n := clientOver(b, toServer(b)), 0
	locktest.Compare(b, locktest.Pair{Name: "Put", Do: func(context.Context) error {
		n++ // a value that doesn't change is not written
		_, err := raw.KV().Put(&api.KVPair{Key: "bench/raw", Value: strconv.AppendInt(nil, int64(n), 10)}, nil)
		return err
	}}, func() dlock.Backend { return over(b, toServer(b), nil) })
}
