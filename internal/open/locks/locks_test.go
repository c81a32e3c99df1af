package locks_test

import (
	"cmp"
	"context"
	"crypto/tls"
	"encoding/pem"
	"fmt"
	"io"
	"net"
	"net/http"
	"net/http/httptest"
	"os"
	"path/filepath"
	"runtime"
	"slices"
	"strconv"
	"strings"
	"sync/atomic"
	"syscall"
	"testing"
	"testing/synctest"
	"time"

	"github.com/alicebob/miniredis/v2"
	"github.com/alicebob/miniredis/v2/server"
	"github.com/stretchr/testify/require"

	"github.com/fencelab/fencelab/dlock"
	"github.com/fencelab/fencelab/faults"
	"github.com/fencelab/fencelab/internal/open/locks"
	"github.com/fencelab/fencelab/internal/open/onaws"
	"github.com/fencelab/fencelab/internal/open/stores"
	"github.com/fencelab/fencelab/internal/testmain"
	"github.com/fencelab/fencelab/resource"
	"github.com/fencelab/fencelab/scenarios/testbed"
)

func TestNames(t *testing.T) {
	require.Equal(t, []string{locks.Consul, locks.Etcd, locks.Postgres, locks.Redis, locks.Redlock, locks.S3, locks.ZooKeeper}, locks.Names())
	for _, name := range locks.Names() {
		require.NotEmpty(t, locks.Addrs(name), name)
	}
	require.Len(t, locks.Addrs(locks.Redlock), 5)
}

func TestOpenRefuses(t *testing.T) {
	const secret = "hunter2"
	for _, c := range []struct {
		spec locks.Spec
		want string
	}{
		{locks.Spec{Lock: "memcached"}, `there is no lock "memcached"; there are consul, etcd, postgres, redis, redlock, s3, zookeeper`},
		{locks.Spec{Lock: locks.Redis, Addrs: []string{"a:1", "b:1"}}, "redis takes one server, but 2 addresses were given"},
		{locks.Spec{Lock: locks.Redis, Addrs: []string{"redis://:" + secret + "@host:port"}}, "not a redis:// URL"},
		{locks.Spec{Lock: locks.Postgres, Addrs: []string{"127.0.0.1:5432"}}, "is not a postgres:// URL, as in"},
		{locks.Spec{Lock: locks.S3, Addrs: []string{"http://id:" + secret + "@host:7070/a/b"}}, "is not like s3://[ID:SECRET@]BUCKET"},
		{locks.Spec{Lock: locks.S3, Addrs: []string{"http://id:" + secret + "@host:port"}}, "is not like s3://[ID:SECRET@]BUCKET"},
		{locks.Spec{Lock: locks.S3, Addrs: []string{"127.0.0.1:7070"}}, "is not like s3://[ID:SECRET@]BUCKET"},
		{locks.Spec{Lock: locks.S3, Addrs: []string{"s3://id:" + secret + "@bucket?endpoint=h:1"}}, "the endpoint of s3 is not of the form http://HOST:PORT"},
		{locks.Spec{Lock: locks.S3, Addrs: []string{"s3://:" + secret + "@bucket"}}, "there are no credentials for s3://:xxxxx@bucket"},
		{locks.Spec{Lock: locks.Redlock, Addrs: []string{"a:1", " a:1", "b:1"}}, "include an empty or repeated one"},
		{locks.Spec{Lock: locks.Etcd, Addrs: []string{"a:1", ""}}, "include an empty or repeated one"},
		{locks.Spec{Lock: locks.Postgres, Addrs: []string{"postgres://u:" + secret + "@host:port/db"}}, "not a postgres:// URL"},
	} {
		c.spec.TTL = time.Second
		b, err := locks.Open(t.Context(), c.spec)
		require.ErrorContains(t, err, c.want)
		require.NotContains(t, err.Error(), secret)
		require.Nil(t, b)
	}
}

// Consul's own variables name its certificates, as for fencelab probe.
func TestConsulCertificate(t *testing.T) {
	s := httptest.NewTLSServer(http.HandlerFunc(func(w http.ResponseWriter, _ *http.Request) { _, _ = io.WriteString(w, `"leader"`) }))
	defer s.Close()
	file := filepath.Join(t.TempDir(), "ca.pem")
	require.NoError(t, os.WriteFile(file, pem.EncodeToMemory(&pem.Block{Type: "CERTIFICATE", Bytes: s.Certificate().Raw}), 0o600))
	t.Setenv("CONSUL_CACERT", file)
	b, err := locks.Open(t.Context(), locks.Spec{Lock: locks.Consul, Addrs: []string{s.URL}, TTL: time.Second})
	require.NoError(t, err)
	defer func() { require.NoError(t, b.Close()) }()
	require.NoError(t, b.Ping(t.Context()))

	t.Setenv("CONSUL_CACERT", file+"-missing")
	_, err = locks.Open(t.Context(), locks.Spec{Lock: locks.Consul, Addrs: []string{s.URL}, TTL: time.Second})
	require.ErrorContains(t, err, file+"-missing")
}

func TestParseURL(t *testing.T) {
	for url, want := range map[string]struct {
		lock  string
		addrs []string
		says  string
	}{
		"redis://:pw@h:1/2":            {locks.Redis, []string{"redis://:pw@h:1/2"}, "redis at h:1/2"},
		"rediss://h:1":                 {locks.Redis, []string{"rediss://h:1"}, "redis at h:1"},
		"redlock://u:p,w@a:1,b:2/3":    {locks.Redlock, []string{"redis://u:p,w@a:1/3", "redis://u:p,w@b:2/3"}, "redlock at a:1/3, b:2/3"},
		"redlocks://a:1,[::1]:2":       {locks.Redlock, []string{"rediss://a:1", "rediss://[::1]:2"}, "redlock at a:1, [::1]:2"},
		"etcd://a:1,b:2":               {locks.Etcd, []string{"http://a:1", "http://b:2"}, "etcd at a:1, b:2"},
		"etcds://a:1/":                 {locks.Etcd, []string{"https://a:1"}, "etcd at a:1"},
		"zookeeper://a:1,b:2":          {locks.ZooKeeper, []string{"a:1", "b:2"}, "zookeeper at a:1, b:2"},
		"consul://a:1":                 {locks.Consul, []string{"http://a:1"}, "consul at a:1"},
		"consuls://a:1":                {locks.Consul, []string{"https://a:1"}, "consul at a:1"},
		"postgres://u:pw@h/db?x=y":     {locks.Postgres, []string{"postgres://u:pw@h/db?x=y"}, "postgres at h/db"},
		"s3://id:pw@bucket/p?region=x": {locks.S3, []string{"s3://id:pw@bucket/p?region=x"}, "s3 at bucket/p"},
		"postgresql://h/?password=p@w": {locks.Postgres, []string{"postgresql://h/?password=p@w"}, "postgres at the given address"},
	} {
		s, err := locks.ParseURL(url)
		require.NoError(t, err, url)
		require.Equal(t, locks.Spec{Lock: want.lock, Addrs: want.addrs}, s)
		require.Equal(t, want.says, s.String())
	}
	for url, want := range map[string]string{
		"":                         "use one of redis://[USER:PASSWORD@]HOST:PORT",
		"hunter2":                  "use one of redis://[USER:PASSWORD@]HOST:PORT",
		"s4://u:hunter2@bucket":    "use one of redis://[USER:PASSWORD@]HOST:PORT",
		"etcd://u:hunter2@h:1":     "a URL of etcd is etcd://HOST:PORT alone, without a user",
		"consul://h:1/path":        "a URL of consul is consul://HOST:PORT alone",
		"redlock://:hunter2@a:1,b": `a URL of redlock is redlock://HOST:PORT, and "b" is not HOST:PORT`,
		"zookeeper://":             `and "" is not HOST:PORT`,
	} {
		_, err := locks.ParseURL(url)
		require.ErrorContains(t, err, want, url)
		require.NotContains(t, err.Error(), "hunter2")
	}
}

// A lock and a store may share a bucket and prefix.
func TestS3URL(t *testing.T) {
	s := testmain.Serve(t, testbed.StartS3, &testbed.Options{AllowEmbedded: true})
	url := onaws.On(onaws.S3, "bucket", s.URL)
	at, query, _ := strings.Cut(url, "?")
	url = at + "/app?" + query
	spec, err := locks.ParseURL(url)
	require.NoError(t, err)
	_, err = locks.Open(t.Context(), spec)
	require.ErrorContains(t, err, "there is no bucket bucket; 'aws s3 mb s3://bucket' creates it")

	store, err := stores.Open(t.Context(), url, stores.Options{})
	require.NoError(t, err)
	defer func() { require.NoError(t, store.Close()) }()
	b, err := locks.Open(t.Context(), spec)
	require.NoError(t, err)
	defer func() { require.NoError(t, b.Close()) }()
	require.NoError(t, b.Ping(t.Context()))
	g, err := b.TryAcquire(t.Context(), dlock.Request{Key: "acme", Owner: "a", TTL: time.Minute})
	require.NoError(t, err)
	require.NoError(t, store.Write(t.Context(), "acme", resource.NewFence(g.Fence, 1), []byte("value")))
	require.NoError(t, b.Release(t.Context(), g))
}

// Amazon's servers aren't probed; TestSlowS3 has a server that is.
func TestS3AtAmazon(t *testing.T) {
	var requests []string
	s := httptest.NewTLSServer(http.HandlerFunc(func(_ http.ResponseWriter, r *http.Request) {
		requests = append(requests, r.Method+" "+r.Host+r.URL.Path)
	}))
	defer s.Close()
	usual := http.DefaultTransport
	http.DefaultTransport = &http.Transport{TLSClientConfig: &tls.Config{InsecureSkipVerify: true}}
	defer func() { http.DefaultTransport = usual }()
	b, err := locks.Open(t.Context(), locks.Spec{
		Lock: locks.S3, Addrs: []string{"s3://id:secret@bucket?region=eu-north-1"},
		Dial: func(ctx context.Context, network, _ string) (net.Conn, error) {
			return new(net.Dialer).DialContext(ctx, network, s.Listener.Addr().String())
		},
	})
	require.NoError(t, err)
	require.NoError(t, b.Close())
	require.Equal(t, []string{"HEAD bucket.s3.eu-north-1.amazonaws.com/"}, requests)
}

// Any node of a Redis Cluster will do, also for a user who may not run INFO.
func TestRedisCluster(t *testing.T) {
	for _, c := range []struct{ name, parameters string }{{"info", ""}, {"hello", "?protocol=3"}, {"hello", "?protocol=2"}} {
		t.Run(c.name+c.parameters, func(t *testing.T) {
			node, other := miniredis.RunT(t), miniredis.RunT(t)
			port, err := strconv.Atoi(other.Port())
			require.NoError(t, err)
			var named atomic.Bool
			node.Server().SetPreHook(func(p *server.Peer, command string, args ...string) bool {
				switch {
				case command == "INFO" && c.name == "info":
					p.WriteBulk("# Cluster\r\ncluster_enabled:1\r\n")
				case command == "INFO":
					p.WriteError("NOPERM this user has no permissions to run the 'info' command")
				case command == "HELLO" && len(args) == 0:
					p.WriteMapLen(2)
					p.WriteBulk("proto")
					p.WriteInt(2)
					p.WriteBulk("mode")
					p.WriteBulk("cluster")
				case command == "CLUSTER":
					p.WriteLen(1)
					p.WriteLen(3)
					p.WriteInt(0)
					p.WriteInt(16383)
					p.WriteLen(3)
					p.WriteBulk(other.Host())
					p.WriteInt(port)
					p.WriteBulk("other")
				case strings.HasPrefix(command, "EVAL"), command == "GET":
					p.WriteError("MOVED 1 " + other.Addr())
				default:
					return false
				}
				return true
			})
			other.Server().SetPreHook(func(_ *server.Peer, command string, args ...string) bool {
				if command == "CLIENT" && slices.Contains(args, "nightly") {
					named.Store(true)
				}
				return false
			})
			url := "redis://" + node.Addr() + cmp.Or(c.parameters, "?") + "&client_name=nightly"
			b, err := locks.Open(t.Context(), locks.Spec{Lock: locks.Redis, Addrs: []string{url}})
			require.NoError(t, err)
			defer func() { require.NoError(t, b.Close()) }()
			require.NoError(t, b.Ping(t.Context()))
			_, err = b.TryAcquire(t.Context(), dlock.Request{Key: "k", Owner: "a", TTL: time.Minute})
			require.NoError(t, err)
			require.True(t, other.Exists("lock:{k}"))
			require.True(t, named.Load())
		})
	}
}

// A majority of a Redlock's nodes answers for it, and nodes that are silent keep nobody waiting, wherever they are in the list.
func TestRedlockPing(t *testing.T) {
	const limit = 5 * time.Second
	for _, c := range []struct {
		name  string
		nodes []string
		want  string
		took  time.Duration
	}{
		{"the first is silent", []string{"silent", "up", "up", "up", "up"}, "", 0},
		{"two are silent", []string{"silent", "silent", "up", "up", "up"}, "", 0},
		{"most are silent", []string{"silent", "up", "silent", "up", "silent"}, "deadline exceeded", limit},
		{"most are down", []string{"silent", "silent", "down", "down", "down"}, "connection refused", 0},
		{"half of four are down", []string{"silent", "down", "down", "up"}, "connection refused", 0},
	} {
		t.Run(c.name, func(t *testing.T) {
			synctest.Test(t, func(t *testing.T) {
				m := miniredis.NewMiniRedis()
				defer m.Close()
				spec := locks.Spec{Lock: locks.Redlock, TTL: time.Second}
				spec.Dial = func(ctx context.Context, _, addr string) (net.Conn, error) {
					switch c.nodes[slices.Index(spec.Addrs, addr)] {
					case "down":
						return nil, syscall.ECONNREFUSED
					case "silent":
						<-ctx.Done()
						return nil, ctx.Err()
					}
					return m.Dial()
				}
				for i := range c.nodes {
					spec.Addrs = append(spec.Addrs, fmt.Sprintf("192.0.2.%d:1", i+1))
				}
				b, err := locks.Open(t.Context(), spec)
				require.NoError(t, err)
				ctx, cancel := context.WithTimeout(t.Context(), limit)
				defer cancel()
				began := time.Now()
				err = b.Ping(ctx)
				require.Equal(t, c.took, time.Since(began))
				if c.want == "" {
					require.NoError(t, err)
				} else {
					require.ErrorContains(t, err, c.want)
				}
				cancel()
				time.Sleep(limit) // the client library dials for as long
				require.NoError(t, b.Close())
			})
		})
	}
}

// A client that was given up ends: it would connect again for ever, and not leave the bubble.
func TestZooKeeperGivenUp(t *testing.T) {
	synctest.Test(t, func(t *testing.T) {
		_, err := locks.Open(t.Context(), locks.Spec{
			Lock: locks.ZooKeeper, Addrs: []string{"127.0.0.1:1"}, TTL: time.Second,
			Dial: func(context.Context, string, string) (net.Conn, error) {
				client, server := net.Pipe()
				go func() { _, _ = io.Copy(io.Discard, server) }()
				return client, nil
			},
		})
		require.ErrorContains(t, err, "no server answered within")
		time.Sleep(10 * time.Minute) // it waits for the server's greeting for 67 s
	})
}

// go-zookeeper's requests take no context, and one without a reply lasts for minutes: pings share one.
func TestZooKeeperPing(t *testing.T) {
	cluster := testmain.ServeCluster(t, testbed.StartZooKeeper, 1, nil)
	link, err := faults.NewLink(cluster.Servers[0].Addr)
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, link.Close()) })
	b, err := locks.Open(t.Context(), locks.Spec{Lock: locks.ZooKeeper, Addrs: []string{link.Addr()}, TTL: time.Second})
	require.NoError(t, err)
	t.Cleanup(func() { require.NoError(t, b.Close()) })
	require.NoError(t, b.Ping(t.Context()))
	_, err = link.LoseReplies(t.Context())
	require.NoError(t, err)
	before := runtime.NumGoroutine()
	for range 20 {
		ctx, cancel := context.WithTimeout(t.Context(), 10*time.Millisecond)
		require.ErrorIs(t, b.Ping(ctx), context.DeadlineExceeded)
		cancel()
	}
	require.Less(t, runtime.NumGoroutine(), before+10)
}
