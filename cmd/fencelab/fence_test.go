package main

import (
	"testing"

	"github.com/alicebob/miniredis/v2"
	"github.com/alicebob/miniredis/v2/server"
	"github.com/stretchr/testify/require"
)

// In a Cluster fence-floor is on another node than most counters. A lock doesn't read it there.
func TestFenceInACluster(t *testing.T) {
	for _, redirect := range []string{"MOVED 1 127.0.0.1:1", "ASK 1 127.0.0.1:1"} {
		m := miniredis.RunT(t)
		var elsewhere string
		m.Server().SetPreHook(func(c *server.Peer, _ string, args ...string) bool {
			if len(args) > 0 && args[0] == elsewhere {
				c.WriteError(redirect)
				return true
			}
			return false
		})
		url := "redis://" + m.Addr()
		show := func(want string) {
			t.Helper()
			out, _, err := tool(t, "fence", "show", "-counter", url, "k")
			require.NoError(t, err)
			require.Equal(t, "the last token of the lock \"k\" is "+want+"\n", out)
		}
		none := func() {
			t.Helper()
			_, _, err := tool(t, "fence", "show", "-counter", url, "k")
			require.ErrorContains(t, err, "there is none")
		}
		none()
		elsewhere = "fence-floor"
		none()
		_, _, err := tool(t, "fence", "set", "-counter", url, "k", "7")
		require.NoError(t, err)
		show("7")
		elsewhere = "fence:{k}"
		_, code, err := tool(t, "fence", "show", "-counter", url, "k")
		require.ErrorContains(t, err, redirect)
		require.Equal(t, 1, code)
	}
}
