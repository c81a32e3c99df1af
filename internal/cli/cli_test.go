package cli_test

import (
	"errors"
	"flag"
	"io"
	"log/slog"
	"net"
	"strings"
	"testing"

	"github.com/stretchr/testify/require"

	"github.com/fencelab/fencelab/internal/cli"
)

var command = cli.Command{Name: "tool", About: "\nWhat it is for.\n", Examples: "\n  tool -ttl 2s\n"}

func TestParse(t *testing.T) {
	t.Setenv("FENCELAB_FENCE", "off")
	t.Setenv("FENCELAB_MAX_BODY", "7")
	var fs flag.FlagSet
	fence := cli.Choice(&fs, "fence", "usage", "on", "off")
	store := cli.Choice(&fs, "store", "usage", "bolt", "memory")
	maxBody := fs.Int("max-body", 1, "usage")
	log := cli.Logger(&fs)
	require.NoError(t, command.Parse(&fs, []string{"-max-body", "9", "-log-level", "debug"}, io.Discard))
	require.Equal(t, "off", *fence, "from the environment")
	require.Equal(t, "bolt", *store, "the default")
	require.Equal(t, 9, *maxBody, "the flag wins")
	require.True(t, log.Enabled(t.Context(), slog.LevelDebug))
}

func TestParseRefuses(t *testing.T) {
	for _, c := range []struct {
		env, arg, want string
	}{
		{"", "-fence=maybe", `tool: invalid value "maybe" for flag -fence: want on or off (tool -h lists the flags)`},
		{"maybe", "", `tool: error setting flag "fence" from environment variable "FENCELAB_FENCE": want on or off (tool -h lists the flags)`},
		{"", "-no", `tool: flag provided but not defined: -no (tool -h lists the flags)`},
		{"", "now", `tool: unexpected argument "now": flags start with a dash (tool -h lists them)`},
	} {
		t.Setenv("FENCELAB_FENCE", c.env)
		var fs flag.FlagSet
		cli.Choice(&fs, "fence", "usage", "on", "off")
		require.EqualError(t, command.Parse(&fs, strings.Fields(c.arg), io.Discard), c.want)
	}
}

func TestHelp(t *testing.T) {
	var fs flag.FlagSet
	cli.Choice(&fs, "fence", "enforce it", "on", "off")
	fs.Duration("lease-ttl", 0, "how `long`\na lease is")
	fs.Bool("verbose", false, "tell more")
	fs.String("token", "", "a secret")
	var out strings.Builder
	require.ErrorIs(t, command.Parse(&fs, []string{"-h"}, &out), flag.ErrHelp)
	require.Equal(t, `Usage: tool [flags]

What it is for.

Flags, each also an environment variable; the flag wins:

  -fence on|off  (FENCELAB_FENCE, default on)
        on|off: enforce it

  -lease-ttl long  (FENCELAB_LEASE_TTL, default 0s)
        how long
        a lease is

  -token string  (FENCELAB_TOKEN)
        a secret

  -verbose  (FENCELAB_VERBOSE, default false)
        tell more

Examples:

  tool -ttl 2s
`, out.String())
}

func TestListen(t *testing.T) {
	ln, err := cli.Listen(t.Context(), "addr", "127.0.0.1:0")
	require.NoError(t, err)
	defer func() { require.NoError(t, ln.Close()) }()
	_, err = cli.Listen(t.Context(), "addr", ln.Addr().String())
	require.ErrorContains(t, err, "is in use: stop what listens there, or choose another with -addr (port 0 takes a free one)")
	_, err = cli.Listen(t.Context(), "metrics", ln.Addr().String())
	require.ErrorContains(t, err, "choose another with -metrics (port 0")
	for addr, want := range map[string]string{"nowhere": "-addr nowhere", "fd:x": "fd:x", "fd:0": "3 or more", "fd:-3": "fd:-3", "fd:9999": "fd:9999"} {
		_, err := cli.Listen(t.Context(), "addr", addr)
		require.ErrorContains(t, err, want)
		_, isNet := errors.AsType[*net.OpError](err)
		require.True(t, isNet || strings.HasPrefix(addr, "fd:"), "%v", err)
	}
}
