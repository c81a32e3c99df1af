package testmain

import (
	"fmt"
	"net"
	"strconv"
	"strings"
	"testing"
	"time"

	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"github.com/fencelab/fencelab/internal/proc"
	"github.com/fencelab/fencelab/scenarios/testbed"
)

// RedisNode is a master of a Redis Cluster.
type RedisNode struct {
	*redis.Client
	*testbed.Server
}

// ServeRedisCluster starts masters that share the slots, one with each list of arguments.
func ServeRedisCluster(tb testing.TB, args ...[]string) (nodes []RedisNode) {
	tb.Helper()
	for i, own := range args {
		port, release, err := proc.ReservePort() // the default, the node's plus 10,000, may not exist
		require.NoError(tb, err)
		tb.Cleanup(func() { require.NoError(tb, release()) })
		bus := strconv.Itoa(port)
		s := Serve(tb, testbed.StartRedis, &testbed.Options{
			Provider: testbed.Local, // where nodes reach each other
			Args:     append([]string{"--cluster-enabled", "yes", "--cluster-port", bus}, own...),
		})
		c := redis.NewClient(&redis.Options{Addr: s.Addr})
		tb.Cleanup(func() { require.NoError(tb, c.Close()) })
		require.NoError(tb, c.ClusterAddSlotsRange(tb.Context(), 16384*i/len(args), 16384*(i+1)/len(args)-1).Err())
		nodes = append(nodes, RedisNode{c, s})
		if i > 0 {
			host, port, err := net.SplitHostPort(s.Addr)
			require.NoError(tb, err)
			require.NoError(tb, nodes[0].Do(tb.Context(), "CLUSTER", "MEET", host, port, bus).Err())
		}
	}
	for _, n := range nodes {
		require.Eventually(tb, func() bool {
			info := n.ClusterInfo(tb.Context()).Val()
			return strings.Contains(info, "cluster_state:ok") && strings.Contains(info, fmt.Sprint("cluster_known_nodes:", len(args)))
		}, time.Minute, 10*time.Millisecond)
	}
	return nodes
}
