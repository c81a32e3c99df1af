package testbed_test

import (
	"cmp"
	"context"
	"errors"
	"fmt"
	"os"
	"os/exec"
	"path/filepath"
	"strings"
	"testing"
	"time"

	"github.com/go-zookeeper/zk"
	"github.com/hashicorp/consul/api"
	"github.com/jackc/pgx/v5"
	"github.com/redis/go-redis/v9"
	"github.com/stretchr/testify/require"

	"github.com/fencelab/fencelab/internal/open"
	"github.com/fencelab/fencelab/internal/open/stores"
	"github.com/fencelab/fencelab/resource"
	"github.com/fencelab/fencelab/scenarios/testbed"
)

// A life is what TestServers needs to know of a type of server.
type life struct {
	start    func(ctx context.Context, o *testbed.Options) (*testbed.Server, error)
	args     []string // get fails without them
	version  string   // a pattern; default: numbers
	volatile bool     // it loses everything when killed
	bad      []string // arguments with which it exits,
	says     string   // and a pattern of its log then
	// put stores something, and get reports whether it is still there. Both connect.
	put func(ctx context.Context, s *testbed.Server) error
	get func(ctx context.Context, s *testbed.Server) (bool, error)
}

var lives = map[string]life{
	"redis": inStore(stores.Redis, life{
		start: testbed.StartRedis,
		args:  []string{"--appendonly", "yes", "--appendfsync", "always"},
		bad:   []string{"--no-such-directive", "1"},
		says:  "no-such-directive",
	}),
	"etcd": {
		start: one(testbed.StartEtcd),
		bad:   []string{"--no-such-flag"},
		says:  "no-such-flag",
		put: func(ctx context.Context, s *testbed.Server) error {
			c, err := newEtcd(s)
			if err != nil {
				return err
			}
			_, err = c.Put(ctx, "kept", "")
			return errors.Join(err, c.Close())
		},
		get: func(ctx context.Context, s *testbed.Server) (bool, error) {
			c, err := newEtcd(s)
			if err != nil {
				return false, err
			}
			got, err := c.Get(ctx, "kept")
			return err == nil && got.Count == 1, errors.Join(err, c.Close())
		},
	},
	"zookeeper": {
		start: one(testbed.StartZooKeeper),
		args:  []string{"minSessionTimeout=600"},
		bad:   []string{"tickTime=none"},
		says:  "NumberFormatException",
		put: func(ctx context.Context, s *testbed.Server) error {
			return onZooKeeper(ctx, s, func(conn *zk.Conn) error {
				_, err := conn.Create("/kept", nil, 0, zk.WorldACL(zk.PermAll))
				return err
			})
		},
		get: func(ctx context.Context, s *testbed.Server) (kept bool, err error) {
			err = onZooKeeper(ctx, s, func(conn *zk.Conn) error {
				for name, want := range map[string]string{
					"tickTime": "200", "minSessionTimeout": "600", "maxSessionTimeout": "3600000", "maxClientCnxns": "0",
				} {
					if got, err := setting(ctx, s.Addr, "conf", name); err != nil || got != want {
						return fmt.Errorf("%s is %q, want %q (%w)", name, got, want, err)
					}
				}
				kept, _, err = conn.Exists("/kept")
				return err
			})
			return kept, err
		},
	},
	"consul": {
		start: testbed.StartConsul,
		args:  []string{`-hcl=node_meta{more="yes"}`},
		bad:   []string{"-no-such-flag"},
		says:  "no-such-flag",
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
				kept = pair != nil
				self, err := c.Agent().Self()
				if debug := self["DebugConfig"]; err == nil && (self["Meta"]["more"] != "yes" || debug["HTTPMaxConnsPerClient"] != 0.0 ||
					debug["DisableUpdateCheck"] != true) {
					err = fmt.Errorf("a setting has no effect: %v", self)
				}
				return err
			})
			return kept, err
		},
	},
	"postgres": inStore(stores.Postgres, life{
		start: testbed.StartPostgres,
		args:  []string{"-c", "event_source=more"},
		bad:   []string{"-c", "no_such_setting=1"},
		says:  "no_such_setting",
	}),
	"s3": inStore(stores.S3, life{
		start:   testbed.StartS3,
		version: `^VERSITYGW$`,
		bad:     []string{"--no-such-flag"},
		says:    `no-such-flag|\$VGW_`, // a container's log may be cut before the rest
	}),
	"dynamodb": inStore(stores.DynamoDB, life{start: testbed.StartDynamoDB, version: `\S`, volatile: true}),
}

// inStore returns l with a write and a read of one of this module's stores.
func inStore(name string, l life) life {
	on := func(ctx context.Context, s *testbed.Server, f func(*stores.Store) error) error {
		store, err := stores.Open(ctx, open.OnServer(name, s).Addr, stores.Options{Fresh: true})
		if err != nil {
			return err
		}
		return errors.Join(f(store), store.Close())
	}
	l.put = func(ctx context.Context, s *testbed.Server) error {
		return on(ctx, s, func(store *stores.Store) error {
			return store.Write(ctx, "kept", resource.Fence{Token: 1, Seq: 1}, []byte("kept"))
		})
	}
	l.get = func(ctx context.Context, s *testbed.Server) (kept bool, err error) {
		err = on(ctx, s, func(store *stores.Store) error {
			_, err := store.Read(ctx, "kept")
			kept = err == nil
			if errors.Is(err, resource.ErrNotFound) {
				err = nil
			}
			return err
		})
		return kept, err
	}
	return l
}

func one(start func(context.Context, int, *testbed.Options) (*testbed.Cluster, error)) func(context.Context, *testbed.Options) (*testbed.Server, error) {
	return func(ctx context.Context, o *testbed.Options) (*testbed.Server, error) {
		c, err := start(ctx, 1, o)
		if err != nil {
			return nil, err
		}
		return c.Servers[0], nil
	}
}

func onRedis(s *testbed.Server, f func(*redis.Client) error) error {
	opt, err := redis.ParseURL(s.URL)
	if err != nil {
		return err
	}
	opt.ContextTimeoutEnabled, opt.ReadTimeout = true, -1
	c := redis.NewClient(opt)
	return errors.Join(f(c), c.Close())
}

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

func onPostgres(ctx context.Context, s *testbed.Server, f func(*pgx.Conn) error) error {
	conn, err := pgx.Connect(ctx, s.URL)
	if err != nil {
		return err
	}
	return errors.Join(f(conn), conn.Close(ctx))
}

// Every type of server is started, frozen, killed, restarted, wiped, used as an external server, and closed.
func TestServers(t *testing.T) {
	for name, l := range lives {
		t.Run(name, func(t *testing.T) {
			onProviders(t, name, func(t *testing.T, p testbed.Provider) { l.require(t, p, "FENCELAB_"+strings.ToUpper(name)+"_ADDR") })
		})
	}
}

func (l life) require(t *testing.T, p testbed.Provider, env string) {
	t.Helper()
	ctx := t.Context()
	if l.bad != nil {
		_, err := l.start(ctx, &testbed.Options{Provider: p, Args: l.bad})
		require.ErrorContains(t, err, "exit")
		require.Regexp(t, l.says, err.Error(), "the end of its log is in the error")
	}
	s, err := l.start(ctx, &testbed.Options{Provider: p, Args: l.args})
	require.NoError(t, err)
	defer func() { require.NoError(t, s.Close()) }()
	require.Equal(t, p, s.Provider)
	require.Regexp(t, cmp.Or(l.version, `^\d+\.\d+(\.\d+)?$`), s.Version)
	require.True(t, strings.HasSuffix(s.String(), " "+s.Version+" ("+string(p)+")"), s.String())
	require.NoError(t, l.put(ctx, s))
	requireKept := func(s *testbed.Server, want bool) {
		t.Helper()
		kept, err := l.get(ctx, s)
		require.NoError(t, err)
		require.Equal(t, want, kept)
	}
	requireKept(s, true)

	external := &testbed.Options{Provider: testbed.External}
	for _, set := range []string{s.Addr, s.URL, "127.0.0.1:1"} {
		if set == s.URL && env == "FENCELAB_ETCD_ADDR" || set == s.URL && env == "FENCELAB_CONSUL_ADDR" {
			continue // host:port only
		}
		t.Setenv(env, set)
		users, err := l.start(ctx, external)
		if set == "127.0.0.1:1" {
			require.ErrorContains(t, err, "the server at 127.0.0.1:1 ("+env+") does not answer")
			continue
		}
		require.NoError(t, err)
		require.Equal(t, []string{s.Addr, s.URL, s.Version, "external"}, []string{users.Addr, users.URL, users.Version, string(users.Provider)})
		_, err = users.Pause(ctx)
		require.ErrorIs(t, err, errors.ErrUnsupported)
		require.ErrorIs(t, users.Kill(ctx), errors.ErrUnsupported)
		require.NoError(t, users.Close())
		requireKept(users, true)
	}

	heal, err := s.Pause(ctx)
	require.NoError(t, err)
	after := during(t, func() error { // its request waits in a socket of the frozen server
		kept, err := l.get(ctx, s)
		if err == nil && !kept {
			err = errors.New("it is gone")
		}
		return err
	})
	require.NoError(t, heal(ctx))
	after()

	addr := s.Addr
	for _, wipe := range []bool{false, true} {
		require.NoError(t, s.Kill(ctx))
		requireGone(t, addr)
		require.NoError(t, s.Restart(ctx, testbed.RestartOptions{Wipe: wipe}))
		require.Equal(t, addr, s.Addr)
		requireKept(s, !wipe && !l.volatile)
	}
	require.NoError(t, s.Close())
	requireGone(t, addr)
	require.NoError(t, s.Close(), "Close again")
}

// A malformed address is refused without being quoted.
func TestExternalAddress(t *testing.T) {
	t.Setenv(testbed.EnvProvider, "external")
	for name, all := range map[string][]string{
		"redis":    {"http://:hunter2@localhost", "redis://:hunter2@local host", "redis://:hunter2@localhost/no-number", "redis://"},
		"postgres": {"http://:hunter2@localhost", "postgres://:hunter2@local host", "postgres:///postgres"},
		"s3":       {"ftp://id:hunter2@localhost", "http://id:hunter2@host:port", "http://id:hunter2@localhost/bucket"},
	} {
		env := "FENCELAB_" + strings.ToUpper(name) + "_ADDR"
		for _, set := range all {
			t.Setenv(env, set)
			_, err := lives[name].start(t.Context(), nil)
			require.ErrorContains(t, err, env+" must be host:port or a URL (", set)
			require.NotContains(t, err.Error(), "hunter2")
		}
		t.Setenv(env, "")
		_, err := lives[name].start(t.Context(), nil)
		require.ErrorContains(t, err, env+" is not set: set it to host:port or a URL (")
	}
	t.Setenv("FENCELAB_ETCD_ADDR", "http://127.0.0.1:1")
	_, err := lives["etcd"].start(t.Context(), nil)
	require.ErrorContains(t, err, "FENCELAB_ETCD_ADDR must be host:port")
	t.Setenv("FENCELAB_ZOOKEEPER_ADDR", " 127.0.0.1:1")
	_, err = testbed.StartZooKeeper(t.Context(), 3, nil)
	require.ErrorContains(t, err, "FENCELAB_ZOOKEEPER_ADDR names 1 of 3 servers; separate them by commas")
	for _, set := range []string{"http://id:hunter2@localhost:1/", "https://id:hunter2@127.0.0.1:1"} {
		t.Setenv("FENCELAB_S3_ADDR", set)
		_, err = testbed.StartS3(t.Context(), nil)
		require.ErrorContains(t, err, "does not answer")
		require.NotContains(t, err.Error(), "hunter2")
	}
}

// A URL's credentials are used.
func TestExternalCredentials(t *testing.T) {
	users := startRedis(t, &testbed.Options{Provider: testbed.Local})
	require.NoError(t, dialRedis(t, users.Addr).ConfigSet(t.Context(), "requirepass", "hunter2").Err())
	external := &testbed.Options{Provider: testbed.External}
	t.Setenv(testbed.EnvRedisAddr, "redis://:hunter2@"+users.Addr+"/0")
	s, err := testbed.StartRedis(t.Context(), external)
	require.NoError(t, err)
	require.Equal(t, users.Addr, s.Addr)
	require.NoError(t, onRedis(s, func(c *redis.Client) error { return c.Ping(t.Context()).Err() }))
	require.NoError(t, s.Close())
	t.Setenv(testbed.EnvRedisAddr, users.Addr)
	_, err = testbed.StartRedis(t.Context(), external)
	require.ErrorContains(t, err, "NOAUTH")
}

// A session lasts for its TTL, however short, and then frees its lock.
func TestConsulSession(t *testing.T) {
	onProviders(t, "consul", func(t *testing.T, p testbed.Provider) {
		s, err := testbed.StartConsul(t.Context(), &testbed.Options{Provider: p})
		testbed.Need(t, err)
		defer func() { require.NoError(t, s.Close()) }()
		require.NoError(t, onConsul(s, func(c *api.Client) error {
			// Twice the TTL, after which Consul ends the session, allows for a stall of two seconds. The default minimum is 10 s.
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

// A killed server's shared memory, which no file system shows, doesn't leak.
func TestPostgresSharedMemory(t *testing.T) {
	s, err := testbed.StartPostgres(t.Context(), &testbed.Options{Provider: testbed.Local})
	testbed.Need(t, err)
	defer func() { require.NoError(t, s.Close()) }()
	var dir string
	require.NoError(t, onPostgres(t.Context(), s, func(conn *pgx.Conn) error {
		return conn.QueryRow(t.Context(), "SHOW data_directory").Scan(&dir)
	}))
	text, err := os.ReadFile(filepath.Join(dir, "postmaster.pid"))
	require.NoError(t, err)
	id := strings.Fields(string(text))[6]
	require.NotEmpty(t, entries(t, filepath.Join(dir, "pg_dynshmem")), "the other shared memory goes with its directory")
	require.NoError(t, s.Close())
	_, failed := errors.AsType[*exec.ExitError](exec.CommandContext(t.Context(), "ipcrm", "-m", id).Run())
	require.True(t, failed, "ipcrm -m %s found something to remove", id)
}

func TestPostgresInitFails(t *testing.T) {
	dir := t.TempDir()
	require.NoError(t, os.WriteFile(dir+"/initdb", []byte("#!/bin/sh\necho cannot; exit 3\n"), 0o700)) //nolint:gosec // a program
	require.NoError(t, os.WriteFile(dir+"/postgres", nil, 0o700))                                      //nolint:gosec // a program
	t.Setenv("FENCELAB_POSTGRES_SERVER", dir+"/postgres")
	_, err := testbed.StartPostgres(t.Context(), &testbed.Options{Provider: testbed.Local})
	require.ErrorContains(t, err, "(exit status 3): cannot")
}
