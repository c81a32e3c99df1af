package main

import (
	"bytes"
	"context"
	"errors"
	"io"
	"math"
	"net/http"
	"net/http/httptest"
	"net/http/httputil"
	"net/url"
	"strings"
	"testing"
	"time"

	"github.com/alicebob/miniredis/v2"
	"github.com/alicebob/miniredis/v2/server"
	"github.com/jackc/pgx/v5"
	"github.com/stretchr/testify/require"

	"github.com/fencelab/fencelab/internal/cli"
	"github.com/fencelab/fencelab/internal/open/locks"
	"github.com/fencelab/fencelab/internal/open/onaws"
	"github.com/fencelab/fencelab/internal/open/stores"
	"github.com/fencelab/fencelab/internal/redisclient"
	"github.com/fencelab/fencelab/internal/testmain"
	"github.com/fencelab/fencelab/resource"
	"github.com/fencelab/fencelab/scenarios/testbed"
)

func tool(t *testing.T, args ...string) (out string, code int, err error) {
	t.Helper()
	var b bytes.Buffer
	if err = run(t.Context(), args, &b); err != nil {
		code = 1
	}
	if exit, ok := errors.AsType[*cli.ExitError](err); ok {
		code, err = exit.Code, exit.Err
	}
	return b.String(), code, err
}

func requireProbe(t *testing.T, code int, url string, want ...string) {
	t.Helper()
	out, got, err := tool(t, "probe", url)
	require.NoError(t, err)
	require.Equal(t, code, got, out)
	for _, w := range want {
		require.Regexp(t, "(?m)^"+w, out)
	}
}

func startRedis(t *testing.T, args ...string) *testbed.Server {
	t.Helper()
	s := testmain.Serve(t, testbed.StartRedis, &testbed.Options{Args: args})
	testbed.Need(t, s.Real())
	return s
}

func TestProbeRedis(t *testing.T) {
	s := startRedis(t)
	requireProbe(t, 1, s.URL, `ok +its clock is [0-9.]+(µ|m)?s (ahead of|behind) this`, `ok +Redis [0-9.]+ at 127.0.0.1:\d+ is not a replica`,
		`bad +appendonly is no, .*'redis-cli -h 127.0.0.1 -p \d+ CONFIG SET appendonly yes'`, `warning +appendfsync is everysec`, "ok +it evicts no keys", "ok +it has no replicas")
	c, err := redisclient.New(s.URL)
	require.NoError(t, err)
	defer func() { require.NoError(t, c.Close()) }()
	set := func(name, value string) { require.NoError(t, c.ConfigSet(t.Context(), name, value).Err()) }
	set("appendonly", "yes")
	requireProbe(t, 0, s.URL, "ok +appendonly is yes", `warning +appendfsync is everysec, .*'redis-cli -h 127.0.0.1 -p \d+ CONFIG SET appendfsync always'`)
	set("appendfsync", "always")
	requireProbe(t, 0, s.URL, "ok +appendfsync is always")
	set("no-appendfsync-on-rewrite", "yes")
	requireProbe(t, 0, s.URL, `warning +no-appendfsync-on-rewrite is yes, .*CONFIG SET no-appendfsync-on-rewrite no'`)
	set("maxmemory", "1gb")
	requireProbe(t, 0, s.URL)
	set("maxmemory-policy", "allkeys-lru")
	requireProbe(t, 1, s.URL, `bad +maxmemory-policy is allkeys-lru, .*'redis-cli -h 127.0.0.1 -p \d+ CONFIG SET maxmemory-policy noeviction'`)
	set("maxmemory-policy", "noeviction")
	require.NoError(t, c.Do(t.Context(), "ACL", "SETUSER", "app", "on", ">hunter2", "~*", "+@all", "-config").Err())
	requireProbe(t, 0, "redis://app:hunter2@"+s.Addr, "warning +appendfsync is unknown")

	replica, err := testbed.StartRedisReplica(t.Context(), s, nil)
	replica = testmain.Started(t, replica, err)
	requireProbe(t, 0, s.URL, "warning +it has replicas")
	requireProbe(t, 1, replica.URL, "bad +it is a replica: use the address of its primary")
	_, node, _ := strings.Cut(s.URL, "://")
	out, code, _ := tool(t, "probe", "redlock://:hunter2@127.0.0.1:1,"+node)
	require.Equal(t, 1, code)
	require.Regexp(t, `(?m)^bad +redlock at 127\.0\.0\.1:1: .*refused`, out)
	require.Regexp(t, `bad +redlock at `, out)
	require.NotContains(t, out, "hunter2")
}

func TestProbeInfo(t *testing.T) {
	m := miniredis.RunT(t)
	for info, want := range map[string]string{
		"# Persistence\r\naof_enabled:1\r\naof_last_write_status:err\r\n": "bad +the last write to the append-only file failed",
		"# Replication\r\nrole:active-replica\r\nconnected_slaves:0\r\n":  "bad +it is an active replica", // KeyDB's
	} {
		m.Server().SetPreHook(func(c *server.Peer, command string, _ ...string) bool {
			if command == "INFO" {
				c.WriteBulk(info)
			}
			return command == "INFO"
		})
		requireProbe(t, 1, "redis://"+m.Addr(), want)
	}
}

// Imitations with a clock that is an hour ahead, and an hour behind.
func TestProbeClock(t *testing.T) {
	s := testmain.Serve(t, testbed.StartRedis, &testbed.Options{Clock: true, Provider: testbed.Local})
	_, err := s.Clock.Jump(t.Context(), 3600e9)
	require.NoError(t, err)
	requireProbe(t, 1, s.URL, `warning +its clock is (1h0m|59m59)\S*s ahead of this machine's: run NTP`)
	_, err = s.Clock.Jump(t.Context(), -7200e9)
	require.NoError(t, err)
	requireProbe(t, 1, s.URL, `warning +its clock is (1h0m|59m59)\S*s behind this machine's: run NTP`)
}

func TestPostgres(t *testing.T) {
	s := testmain.Serve(t, testbed.StartPostgres, nil)
	c, err := pgx.Connect(t.Context(), s.URL)
	require.NoError(t, err)
	defer func() { require.NoError(t, c.Close(context.Background())) }()
	do := func(sql string) {
		t.Helper()
		_, err := c.Exec(t.Context(), sql)
		require.NoError(t, err)
	}
	out, _, err := tool(t, "probe", s.URL)
	require.NoError(t, err)
	require.Regexp(t, `(?m)^ok +PostgreSQL \d+.* is not a standby$`, out)
	require.Regexp(t, `(?m)^ok +its clock is`, out)
	require.Regexp(t, `(?m)^ok +it has no asynchronous standby`, out)
	require.Regexp(t, `(?m)^(ok +fsync is on|bad +fsync is off, .*'ALTER SYSTEM SET fsync = on')`, out)
	with := "?"
	if strings.Contains(s.URL, with) {
		with = "&"
	}
	do("CREATE UNLOGGED TABLE fencelab_lock (key text)")
	requireProbe(t, 1, s.URL+with+"pool_max_conns=2", "bad +fencelab_lock: unlogged") // as the lock's URL may have
	do("DROP TABLE fencelab_lock")
	out, _, _ = tool(t, "probe", s.URL)
	require.Regexp(t, "(?m)^ok +its tables of tokens and fences are logged", out)
	require.NotContains(t, out, "idle_in_transaction_session_timeout", "without a table of fences")
	do("CREATE UNLOGGED TABLE fencelab_fence (key text)")
	requireProbe(t, 1, s.URL, "bad +fencelab_fence: unlogged")
	do("DROP TABLE fencelab_fence; CREATE TABLE fencelab_fence (key text) PARTITION BY HASH (key); " +
		"CREATE UNLOGGED TABLE part PARTITION OF fencelab_fence FOR VALUES WITH (MODULUS 1, REMAINDER 0)")
	requireProbe(t, 1, s.URL, "bad +part: unlogged")
	do("ALTER TABLE part SET LOGGED")
	out, _, _ = tool(t, "probe", s.URL)
	require.Regexp(t, "(?m)^warning +idle_in_transaction_session_timeout is 0", out)
	do("ALTER DATABASE postgres SET idle_in_transaction_session_timeout = '1min'")
	out, _, _ = tool(t, "probe", s.URL)
	require.NotContains(t, out, "idle_in_transaction_session_timeout")
	do("ALTER DATABASE postgres SET synchronous_commit = off")
	requireProbe(t, 1, s.URL, `bad +synchronous_commit is off, .*'ALTER SYSTEM SET synchronous_commit = on'`)
	out, code, _ := tool(t, "probe", strings.Replace(s.URL, s.Addr, "127.0.0.1:1", 1))
	require.Equal(t, 1, code)
	require.Regexp(t, "^bad +postgres at 127.0.0.1:1", out)
}

func TestProbeClusters(t *testing.T) {
	for lock, c := range map[string]struct {
		want  string
		start func() (*testbed.Server, error)
	}{
		locks.Etcd:      {`ok +etcd 3\.[0-9.]+ at http://\S+ has a leader`, func() (*testbed.Server, error) { return first(testbed.StartEtcd(t.Context(), 1, nil)) }},
		locks.ZooKeeper: {`ok +ZooKeeper 3\.[0-9.]+ at \S+ is standalone`, func() (*testbed.Server, error) { return first(testbed.StartZooKeeper(t.Context(), 1, nil)) }},
		locks.Consul:    {`ok +Consul 1\.[0-9.]+ at http://\S+ has a leader`, func() (*testbed.Server, error) { return testbed.StartConsul(t.Context(), nil) }},
	} {
		t.Run(lock, func(t *testing.T) {
			s, err := c.start()
			s = testmain.Started(t, s, err)
			url := lock + "://" + s.Addr
			requireProbe(t, 0, url, c.want)
			if lock != locks.Etcd && s.Kill(t.Context()) == nil { // etcd's client retries until the timeout
				requireProbe(t, 1, url, "bad +"+lock+" at "+s.Addr+": ")
			}
		})
	}
}

func first(c *testbed.Cluster, err error) (*testbed.Server, error) {
	if err != nil {
		return nil, err
	}
	return c.Servers[0], nil
}

func TestProbeStores(t *testing.T) {
	for _, name := range []string{stores.S3, stores.DynamoDB} {
		t.Run(name, func(t *testing.T) {
			start := map[string]func(context.Context, *testbed.Options) (*testbed.Server, error){stores.S3: testbed.StartS3, stores.DynamoDB: testbed.StartDynamoDB}[name]
			s := testmain.Serve(t, start, &testbed.Options{AllowEmbedded: true})
			url := onaws.On(name, "name", s.URL)
			requireProbe(t, 1, url, "bad +"+name+": ") // there is no bucket, and probe makes none
			store, err := stores.Open(t.Context(), url, stores.Options{})
			require.NoError(t, err)
			require.NoError(t, store.Close())
			requireProbe(t, 0, url, "ok +"+name+" refuses stale tokens")
			requireProbe(t, 0, url)
			if name != stores.DynamoDB {
				return
			}
			requireProbe(t, 0, url, "ok +its table is in one region, or")
			for reply, want := range map[string]string{
				`{"Table": {"Replicas": [{}], "MultiRegionConsistency": "STRONG"}}`:   "ok +its table is in one region, or",
				`{"Table": {"Replicas": [{}], "MultiRegionConsistency": "EVENTUAL"}}`: "bad +its table is a global one with",
				`{"Table": {"Replicas": [{}]}}`:                                       "bad +its table is a global one with",
				`{}`:                                                                  "ok +its table is in one region, or",
				`{`:                                                                   "warning +whether its table is a global one is unknown: ",
			} {
				requireProbe(t, map[bool]int{true: 1}[strings.HasPrefix(want, "bad")], onaws.On(name, "name", describes(t, s.URL, reply)), want)
			}
		})
	}
	for unfenced, want := range map[bool]string{false: "ok +http refuses stale tokens", true: "bad +http: .* runs with fencing off"} {
		url := testmain.Resource(t, resource.NewMemory(), &resource.HandlerOptions{Unfenced: unfenced})
		code := map[bool]int{true: 1}[unfenced]
		requireProbe(t, code, url, want)
		requireProbe(t, code, url, want)
	}
	requireProbe(t, 0, testmain.Resource(t, overtaken{resource.NewMemory()}, nil), "ok +http refuses stale tokens")
	require.ErrorContains(t, refusesStale(t.Context(), &stores.Store{Store: refusing{resource.NewMemory()}}), "seen 1, got 2")
	full := resource.NewMemory()
	require.NoError(t, full.Write(t.Context(), "fencelab-probe", resource.NewFence(math.MaxUint64-1, 1), nil))
	requireProbe(t, 1, testmain.Resource(t, full, nil), "bad +http: .* 'fencelab fence set -force URL fencelab-probe 1', or for http, with the server stopped: resource -file FILE -set-fence 'fencelab-probe=1'")

	m := resource.NewMemory()
	require.NoError(t, m.Write(t.Context(), "acme", resource.Fence{Token: 5, Seq: 2}, make([]byte, resource.DefaultMaxBody+1)))
	require.NoError(t, m.Write(t.Context(), "acme's 1", resource.Fence{Token: 6, Seq: 1}, nil))
	url := testmain.Resource(t, m, &resource.HandlerOptions{Token: "secret"})
	says(t, "the fence of \"acme\" was 5.2 and is 6.0\n", "set", "-token", "secret", url, "acme", "6")
	says(t, "where the file is: resource -file FILE -set-fence 'acme'\\''s 1=4'", "set", "-token", "secret", "-force", url, "acme's 1", "4")
	says(t, "401", "show", url, "acme")
}

// describes is a DynamoDB that describes its tables by reply.
func describes(t *testing.T, server, reply string) (addr string) {
	t.Helper()
	to, err := url.Parse(server)
	require.NoError(t, err)
	proxy := httputil.NewSingleHostReverseProxy(&url.URL{Scheme: to.Scheme, Host: to.Host})
	srv := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if strings.HasSuffix(r.Header.Get("X-Amz-Target"), ".DescribeTable") {
			_, _ = io.WriteString(w, reply)
			return
		}
		proxy.ServeHTTP(w, r)
	}))
	t.Cleanup(srv.Close)
	to.Host = srv.Listener.Addr().String()
	return to.String()
}

// overtaken is a store that another probe writes to after each Read.
type overtaken struct{ resource.Store }

func (o overtaken) Read(ctx context.Context, key string) (resource.Record, error) {
	rec, err := o.Store.Read(ctx, key)
	return rec, errors.Join(err, o.Write(ctx, key, resource.NewFence(rec.MaxFence.Token+3, 1), nil))
}

type refusing struct{ resource.Store }

func (refusing) Write(_ context.Context, key string, f resource.Fence, _ []byte) error {
	return &resource.StaleTokenError{Key: key, Seen: resource.NewFence(f.Token-1, 1), Got: f}
}

// A server whose Last-Modified is an hour behind its Date, and users who may write only a lock's objects, or a store's.
func TestProbeS3(t *testing.T) {
	s := testmain.Serve(t, testbed.StartS3, &testbed.Options{AllowEmbedded: true})
	at, err := url.Parse(s.URL)
	require.NoError(t, err)
	var forbidden string
	behind := time.Duration(0)
	user := at.User
	at.User = nil
	to := httputil.NewSingleHostReverseProxy(at)
	to.ModifyResponse = func(r *http.Response) error {
		if modified, err := http.ParseTime(r.Header.Get("Last-Modified")); err == nil {
			r.Header.Set("Last-Modified", modified.Add(-behind).Format(http.TimeFormat))
		}
		return nil
	}
	proxy := httptest.NewServer(http.HandlerFunc(func(w http.ResponseWriter, r *http.Request) {
		if forbidden != "" && r.Method == http.MethodPut && strings.Contains(r.URL.Path, forbidden) {
			w.WriteHeader(http.StatusForbidden)
			return
		}
		to.ServeHTTP(w, r)
	}))
	t.Cleanup(proxy.Close)
	bucket := onaws.On(onaws.S3, "name", s.URL)
	store, err := stores.Open(t.Context(), bucket, stores.Options{})
	require.NoError(t, err)
	require.NoError(t, store.Close())
	bucket = onaws.On(onaws.S3, "name", strings.Replace(proxy.URL, "://", "://"+user.String()+"@", 1))
	for _, forbidden = range []string{"", "name/lock/", "name/~"} {
		requireProbe(t, 0, bucket, "ok +s3 refuses stale tokens", "ok +its Date and Last-Modified agree")
	}
	forbidden = "name/"
	requireProbe(t, 1, bucket, "bad +s3: .*403")
	forbidden, behind = "", time.Hour
	requireProbe(t, 0, bucket, "warning +its Date is (1h0m|59m5).* after an object's Last-Modified")
	behind = -time.Hour
	requireProbe(t, 0, bucket, "warning +its Date is -(1h0m|59m5).* after an object's Last-Modified")
}

func TestProbeAnotherService(t *testing.T) {
	s := testmain.Serve(t, testbed.StartRedis, &testbed.Options{AllowEmbedded: true})
	requireProbe(t, 1, "consul://"+s.Addr, `bad +consul at \S+: .*EOF; is it the right port, and with or without TLS\?`)
}

func TestProbeMisuse(t *testing.T) {
	for _, args := range [][]string{{}, {"a", "b"}, {"ftp://u:hunter2@h"}, {"etcd://u:hunter2@h:1"}, {"redlock://:hunter2@h"}, {"s3://id:hunter2@"}, {"-x"}} {
		out, code, err := tool(t, append([]string{"probe"}, args...)...)
		require.Equal(t, 2, code, "%q", args)
		require.ErrorContains(t, err, "fencelab probe: ")
		require.NotContains(t, err.Error()+out, "hunter2")
	}
	out, code, _ := tool(t, "probe", "redis://:hunter2@host:port")
	require.Equal(t, 1, code)
	require.NotContains(t, out, "hunter2")
}
