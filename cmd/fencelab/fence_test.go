package main

import (
	"slices"
	"testing"

	"github.com/alicebob/miniredis/v2"
	"github.com/alicebob/miniredis/v2/server"
	"github.com/stretchr/testify/require"

	"github.com/fencelab/fencelab/internal/redisclient"
)

// In a Cluster fence-floor is on another node than most counters. A lock doesn't read it there.
func TestFenceInACluster(t *testing.T) {
	for _, redirect := range []string{"MOVED 1 127.0.0.1:1", "ASK 1 127.0.0.1:1"} {
		m := miniredis.RunT(t)
		var elsewhere string
		m.Server().SetPreHook(func(c *server.Peer, _ string, args ...string) bool {
			switch slices.Index(args, elsewhere) {
			case -1:
				return false
			case 0:
				c.WriteError(redirect)
			default: // a script's key that is not the first
				c.WriteError("CROSSSLOT Keys in request don't hash to the same slot")
			}
			return true
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

// A counter is reaped between the command's read, which has found 10, and its write.
func TestReapedMeanwhile(t *testing.T) {
	m := miniredis.RunT(t)
	require.NoError(t, m.Set("fence-floor", "20"))
	client, err := redisclient.New("redis://" + m.Addr())
	require.NoError(t, err)
	c := counter{client}
	defer func() { require.NoError(t, c.Close()) }()
	require.NoError(t, c.set(t.Context(), "k", 15, false))
	require.False(t, m.Exists("fence:{k}"), "its next token must be 21")
	require.NoError(t, c.set(t.Context(), "k", 25, false))
	m.CheckGet(t, "fence:{k}", "25")
}
