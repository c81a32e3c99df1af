package main

import (
	"fmt"
	"testing"
	"time"

	"github.com/stretchr/testify/require"

	"github.com/fencelab/fencelab/dlock"
	"github.com/fencelab/fencelab/internal/open/locks"
	"github.com/fencelab/fencelab/internal/open/stores"
	"github.com/fencelab/fencelab/internal/testmain"
	"github.com/fencelab/fencelab/resource"
)

// Any node of a Redis Cluster will do, also for keys that are on another one.
func TestRedisCluster(t *testing.T) {
	nodes := testmain.ServeRedisCluster(t, []string{"--appendonly", "yes"}, nil)
	for _, n := range nodes {
		first, second := nodes[0].Addr, nodes[1].Addr
		url := "redis://" + n.Addr
		requireProbe(t, 1, url, "ok +"+first+" is a master of a Redis Cluster", "ok +Redis .* at "+first+" is not a replica", "ok +appendonly is yes",
			"ok +"+second+" is a master of a Redis Cluster", "ok +Redis .* at "+second+" is not a replica", "bad +appendonly is no")
		b, err := locks.Open(t.Context(), locks.Spec{Lock: locks.Redis, Addrs: []string{url}})
		require.NoError(t, err)
		s, err := stores.Open(t.Context(), url, stores.Options{Cluster: true})
		require.NoError(t, err)
		for i := range 8 { // on both nodes
			key := fmt.Sprint(n.Addr, i)
			says(t, "there is none in fence:{"+key+"}", "show", "-counter", url, key)
			_, err = b.TryAcquire(t.Context(), dlock.Request{Key: key, Owner: "x", TTL: time.Minute})
			require.NoError(t, err)
			says(t, "was 1 and is 11", "set", "-counter", url, key, "10")
			says(t, "is 11", "show", "-counter", url, key)
			require.NoError(t, s.Write(t.Context(), key, resource.NewFence(1<<60, 1), nil))
			says(t, "is 7", "set", "-force", url, key, "7")
			require.NoError(t, s.Write(t.Context(), key, resource.NewFence(8, 1), nil))
		}
		require.NoError(t, b.Close())
		require.NoError(t, s.Close())
	}
}
