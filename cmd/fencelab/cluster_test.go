package main

import (
	"fmt"
	"net"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"github.com/fencelab/fencelab/dlock"
	"github.com/fencelab/fencelab/internal/open/locks"
	"github.com/fencelab/fencelab/internal/open/stores"
	"github.com/fencelab/fencelab/internal/proc"
	"github.com/fencelab/fencelab/internal/redisclient"
	"github.com/fencelab/fencelab/internal/testmain"
	"github.com/fencelab/fencelab/resource"
	"github.com/fencelab/fencelab/scenarios/testbed"
)

// startRedisCluster starts two masters.
func startRedisCluster(t *testing.T) (nodes [2]*redis.Client) {
	t.Helper()
	var bus string
	for i := range nodes {
		port, release, err := proc.ReservePort() // the default, the node's plus 10,000, may not exist
		require.NoError(t, err)
		t.Cleanup(func() { require.NoError(t, release()) })
		bus = strconv.Itoa(port)
		s := testmain.Serve(t, testbed.StartRedis, &testbed.Options{
			Provider: testbed.Local, // where nodes reach each other
			Args:     []string{"--cluster-enabled", "yes", "--cluster-port", bus, "--appendonly", []string{"yes", "no"}[i]},
		})
		if nodes[i], err = redisclient.New(s.URL); err != nil {
			t.Fatal(err)
		}
		t.Cleanup(func() { require.NoError(t, nodes[i].Close()) })
		require.NoError(t, nodes[i].ClusterAddSlotsRange(t.Context(), 8192*i, 8192*(i+1)-1).Err())
	}
	host, port, err := net.SplitHostPort(nodes[1].Options().Addr)
	require.NoError(t, err)
	require.NoError(t, nodes[0].Do(t.Context(), "CLUSTER", "MEET", host, port, bus).Err())
	for _, n := range nodes {
		require.Eventually(t, func() bool {
			info := n.ClusterInfo(t.Context()).Val()
			return strings.Contains(info, "cluster_state:ok") && strings.Contains(info, "cluster_known_nodes:2")
		}, patience, 10*time.Millisecond)
	}
	return nodes
}

// Any node of a Redis Cluster will do, also for keys that are on another one.
func TestRedisCluster(t *testing.T) {
	nodes := startRedisCluster(t)
	for _, n := range nodes {
		first, second := nodes[0].Options().Addr, nodes[1].Options().Addr
		url := "redis://" + n.Options().Addr
		requireProbe(t, 1, url, "ok +"+first+" is a master of a Redis Cluster", "ok +Redis .* at "+first+" is not a replica", "ok +appendonly is yes",
			"ok +"+second+" is a master of a Redis Cluster", "ok +Redis .* at "+second+" is not a replica", "bad +appendonly is no")
		b, err := locks.Open(t.Context(), locks.Spec{Lock: locks.Redis, Addrs: []string{url}})
		require.NoError(t, err)
		s, err := stores.Open(t.Context(), url, stores.Options{Cluster: true})
		require.NoError(t, err)
		for i := range 8 { // on both nodes
			key := fmt.Sprint(n.Options().Addr, i)
			f := func(want string, args ...string) {
				t.Helper()
				out, _, err := tool(t, append([]string{"fence"}, args...)...)
				require.NoError(t, err)
				require.Contains(t, out, want)
			}
			_, _, err := tool(t, "fence", "show", "-counter", url, key)
			require.ErrorContains(t, err, "there is none in fence:{"+key+"}")
			_, err = b.TryAcquire(t.Context(), dlock.Request{Key: key, Owner: "x", TTL: time.Minute})
			require.NoError(t, err)
			f("was 1 and is 11", "set", "-counter", url, key, "10")
			f("is 11", "show", "-counter", url, key)
			require.NoError(t, s.Write(t.Context(), key, resource.NewFence(1<<60, 1), nil))
			f("is 7", "set", "-force", url, key, "7")
			require.NoError(t, s.Write(t.Context(), key, resource.NewFence(8, 1), nil))
		}
		require.NoError(t, b.Close())
		require.NoError(t, s.Close())
	}
}
