package testbed_test

import (
	"context"
	"errors"
	"fmt"
	"testing"
	"time"

	"github.com/hashicorp/consul/api"
	"github.com/stretchr/testify/require"

	"github.com/fencelab/fencelab/scenarios/testbed"
)

// onConsul has a client for as long as f takes.
func onConsul(s *testbed.Server, f func(*api.Client) error) error {
	config := api.DefaultConfig()
	config.Address = s.URL
	config.Transport.DisableKeepAlives = true
	c, err := api.NewClient(config)
	if err != nil {
		return err
	}
	return f(c)
}

func TestConsul(t *testing.T) {
	onProviders(t, "consul", func(t *testing.T, p testbed.Provider) {
		requireLife(t, p, life{
			start: testbed.StartConsul,
			args:  []string{`-hcl=node_meta{more="yes"}`},
			put: func(ctx context.Context, s *testbed.Server) error {
				return onConsul(s, func(c *api.Client) error {
					_, err := c.KV().Put(&api.KVPair{Key: "kept"}, (&api.WriteOptions{}).WithContext(ctx))
					return err
				})
			},
			get: func(ctx context.Context, s *testbed.Server) (kept bool, err error) {
				err = onConsul(s, func(c *api.Client) error {
					pair, _, err := c.KV().Get("kept", (&api.QueryOptions{RequireConsistent: true}).WithContext(ctx))
					if err != nil {
						return err
					}
					self, err := c.Agent().Self()
					if err == nil && self["Meta"]["more"] != "yes" {
						err = errors.New("the further arguments don't matter")
					}
					if most := self["DebugConfig"]["HTTPMaxConnsPerClient"]; most != 0.0 {
						err = errors.Join(err, fmt.Errorf("a client may have %v connections only", most))
					}
					if self["DebugConfig"]["DisableUpdateCheck"] != true {
						err = errors.Join(err, errors.New("it calls its maker"))
					}
					kept = pair != nil
					return err
				})
				return kept, err
			},
		})
	})
}

// A session lasts for its TTL, as short as that may be, and then frees its lock at once.
func TestConsulSession(t *testing.T) {
	onProviders(t, "consul", func(t *testing.T, p testbed.Provider) {
		s, err := testbed.StartConsul(t.Context(), &testbed.Options{Provider: p})
		testbed.Need(t, err)
		defer func() { require.NoError(t, s.Close()) }()
		require.NoError(t, onConsul(s, func(c *api.Client) error {
			// Of the shortest sessions that Consul allows elsewhere none ends before 10 s. This one ends after twice its TTL, and
			// lives until it has the lock on a machine that stands still for two seconds.
			const ttl, elsewhere = 1500 * time.Millisecond, 10 * time.Second
			start := time.Now()
			id, _, err := c.Session().CreateNoChecks(&api.SessionEntry{TTL: ttl.String(), LockDelay: 1}, nil)
			require.NoError(t, err)
			held, _, err := c.KV().Acquire(&api.KVPair{Key: "lock", Session: id}, nil)
			require.NoError(t, err)
			require.True(t, held)
			for q := (&api.QueryOptions{WaitTime: time.Minute}); ; {
				pair, meta, err := c.KV().Get("lock", q)
				require.NoError(t, err)
				if pair.Session == "" {
					break
				}
				q.WaitIndex = meta.LastIndex
			}
			lasted := time.Since(start)
			require.GreaterOrEqual(t, lasted, ttl)
			require.Less(t, lasted, elsewhere)
			return nil
		}))
	})
}

func TestConsulThatEnds(t *testing.T) {
	onProviders(t, "consul", func(t *testing.T, p testbed.Provider) {
		_, err := testbed.StartConsul(t.Context(), &testbed.Options{Provider: p, Args: []string{"-no-such-flag"}})
		require.ErrorContains(t, err, "exit")
		require.ErrorContains(t, err, "no-such-flag", "its log is in the error")
	})
}

func TestConsulExternal(t *testing.T) {
	users, err := testbed.StartConsul(t.Context(), &testbed.Options{Provider: testbed.Local})
	testbed.Need(t, err)
	defer func() { require.NoError(t, users.Close()) }()

	t.Setenv(testbed.EnvConsulAddr, users.Addr)
	s, err := testbed.StartConsul(t.Context(), &testbed.Options{Provider: testbed.External})
	testbed.Need(t, err)
	require.Equal(t, users.Addr, s.Addr)
	require.Equal(t, users.Version, s.Version)
	require.ErrorIs(t, s.Kill(t.Context()), errors.ErrUnsupported)
	require.NoError(t, s.Close())
	require.True(t, listens(t, users.Addr), "Close leaves the user's server alone")

	t.Setenv(testbed.EnvConsulAddr, "127.0.0.1:1")
	_, err = testbed.StartConsul(t.Context(), &testbed.Options{Provider: testbed.External})
	require.ErrorContains(t, err, "the server at 127.0.0.1:1 (FENCELAB_CONSUL_ADDR) does not answer")
}
