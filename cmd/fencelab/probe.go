package main

import (
	"cmp"
	"context"
	"crypto/rand"
	"errors"
	"flag"
	"fmt"
	"io"
	"maps"
	"math"
	"net"
	"net/http"
	"regexp"
	"slices"
	"sync"
	"time"

	"github.com/aws/aws-sdk-go-v2/aws/middleware"
	"github.com/aws/aws-sdk-go-v2/service/s3"
	smithyhttp "github.com/aws/smithy-go/transport/http"
	"github.com/hashicorp/consul/api"
	"github.com/redis/go-redis/v9"
	clientv3 "go.etcd.io/etcd/client/v3"
	"go.uber.org/zap"

	"github.com/fencelab/fencelab/internal/cli"
	"github.com/fencelab/fencelab/internal/open/locks"
	"github.com/fencelab/fencelab/internal/open/stores"
	"github.com/fencelab/fencelab/internal/s3object"
	"github.com/fencelab/fencelab/resource"
)

var probeCommand = cli.Command{
	Name: "fencelab probe", Args: "URL",
	About: `
Checks whether a lock service or a store can fence, one line per check: ok, warning or
bad. It writes to stores at http://, dynamodb:// and s3:// only: a record with the
key fencelab-probe, or objects that it deletes.

Exit codes: 0 nothing is bad; 1 something is bad; 2 wrong arguments.`,
	Examples: `
  fencelab probe redis://127.0.0.1:6379
  fencelab probe 's3://bucket?endpoint=http://127.0.0.1:7070'`,
}

const probeTimeout = 10 * time.Second

func runProbe(ctx context.Context, args []string, stdout io.Writer) error {
	var fs flag.FlagSet
	token := bearer(&fs)
	args, err := parse(probeCommand, &fs, 1, args, stdout)
	if err != nil {
		return err
	}
	p := probe{out: stdout}
	spec, err := locks.ParseURL(args[0])
	check := map[string]func(context.Context, string) error{
		locks.Redis: p.redis, locks.Redlock: p.redis, locks.Postgres: p.postgres,
		locks.Etcd: p.etcd, locks.Consul: p.consul, locks.ZooKeeper: p.zooKeeper,
	}[spec.Lock]
	switch {
	case spec.Lock == locks.S3:
		var o object
		o, err = openObject(ctx, args[0])
		check = func(ctx context.Context, _ string) error { return p.s3(ctx, o) }
	case errors.Is(err, locks.ErrScheme):
		var s *stores.Store
		if s, err = stores.Open(ctx, args[0], stores.Options{Token: *token, Prepared: true}); err == nil {
			defer func() { _ = s.Close() }()
			spec.Addrs = []string{s.Name}
			check = func(ctx context.Context, name string) error {
				err := refusesStale(ctx, s)
				p.expect(err == nil, bad, name+" refuses stale tokens", fmt.Sprintf("%s: %v", name, err))
				if err == nil && s.Diverges != nil {
					diverges, err := s.Diverges(ctx)
					const good, failure = "its table is in one region, or strongly consistent across regions", "its table is a global one with eventual consistency, " +
						"where regions accept each other's stale tokens: use one region, strong consistency (MRSC), or one region for all writes of a key"
					if err == nil {
						p.expect(!diverges, bad, good, failure)
					} else {
						p.expect(false, warning, "", fmt.Sprintf("whether its table is a global one is unknown: %v", err))
					}
				}
				return nil
			}
		}
	}
	if err != nil {
		return misuse(fmt.Errorf("fencelab probe: %w ('fencelab -h' lists all URLs)", err))
	}
	for _, addr := range spec.Addrs {
		ctx, cancel := context.WithTimeoutCause(ctx, probeTimeout, fmt.Errorf("no answer within %v", probeTimeout))
		if err := check(ctx, addr); err != nil {
			failure := fmt.Sprintf("%v: %v", locks.Spec{Lock: spec.Lock, Addrs: []string{addr}}, cli.OrEnd(ctx, err))
			if errors.Is(ctx.Err(), context.DeadlineExceeded) || errors.Is(err, io.EOF) {
				failure += "; is it the right port, and with or without TLS?"
			}
			p.expect(false, bad, "", failure)
		}
		cancel()
	}
	if p.err == nil && p.bad {
		return &cli.ExitError{Code: 1}
	}
	return p.err
}

const warning, bad = "warning", "bad" // levels of a check

type probe struct {
	out io.Writer
	bad bool
	err error // of out
}

func (p *probe) expect(good bool, level, success, failure string) {
	text := failure
	if good {
		level, text = "ok", success
	}
	p.bad = p.bad || level == bad
	_, err := fmt.Fprintf(p.out, "%-8s %s\n", level, text)
	p.err = errors.Join(p.err, err)
}

// clock compares clocks by the reply to a request sent at sent.
func (p *probe) clock(now, sent time.Time) {
	rtt := time.Since(sent)
	offset := now.Sub(sent.Add(rtt / 2)).Round(time.Millisecond)
	side := "ahead of"
	if offset < 0 {
		side = "behind"
	}
	reading := fmt.Sprintf("its clock is %v %s this machine's", offset.Abs(), side)
	p.expect(offset.Abs() <= time.Second+rtt, warning, reading, reading+": run NTP; a server clock that jumps ends leases early or late")
}

// redis checks a server, or all masters of its Cluster.
func (p *probe) redis(ctx context.Context, addr string) error {
	c, err := openCounter(ctx, addr)
	if err != nil {
		return err
	}
	defer func() { _ = c.Close() }()
	cluster, ok := c.UniversalClient.(*redis.ClusterClient)
	if !ok {
		return p.redisServer(ctx, c.UniversalClient.(*redis.Client))
	}
	var mu sync.Mutex
	masters := map[string]*redis.Client{}
	if err := cluster.ForEachMaster(ctx, func(_ context.Context, m *redis.Client) error { // concurrently
		mu.Lock()
		defer mu.Unlock()
		masters[m.Options().Addr] = m
		return nil
	}); err != nil {
		return err
	}
	for _, at := range slices.Sorted(maps.Keys(masters)) {
		p.expect(true, "", at+" is a master of a Redis Cluster", "")
		if err := p.redisServer(ctx, masters[at]); err != nil {
			p.expect(false, bad, "", fmt.Sprintf("redis at %s: %v", at, cli.OrEnd(ctx, err)))
		}
	}
	return nil
}

func (p *probe) redisServer(ctx context.Context, c *redis.Client) error {
	sent := time.Now()
	now, err := c.Time(ctx).Result()
	if err != nil {
		return err
	}
	p.clock(now, sent)
	sections, err := c.InfoMap(ctx).Result()
	if err != nil {
		return err
	}
	info := map[string]string{}
	for _, s := range sections {
		maps.Copy(info, s)
	}
	tool := "redis-cli"
	if host, port, err := net.SplitHostPort(c.Options().Addr); err == nil && (host != "127.0.0.1" && host != "localhost" || port != "6379") {
		tool += " -h " + host + " -p " + port // or it would change another Redis's settings
	}
	if c.Options().TLSConfig != nil {
		tool += " --tls"
	}
	set := func(setting string) string {
		return fmt.Sprintf("'%s CONFIG SET %s', then '%s CONFIG REWRITE'", tool, setting, tool)
	}
	fsync := "unknown"
	config, err := c.ConfigGet(ctx, "*appendfsync*").Result()
	if err == nil { // providers forbid it
		fsync = config["appendfsync"]
	}
	active := info["role"] == "active-replica" // KeyDB's
	replica := "it is a replica: use the address of its primary"
	if active {
		replica = "it is an active replica: its peers accept writes too, so tokens and fences can go back: use one server, without active-replica"
	}
	p.expect(info["role"] != "slave" && !active, bad, "Redis "+info["redis_version"]+" at "+c.Options().Addr+" is not a replica", replica)
	p.expect(info["connected_slaves"] == "0", warning, "it has no replicas", "it has replicas: a failover loses the tokens and fences that they lack")
	p.expect(info["aof_enabled"] == "1", bad, "appendonly is yes",
		"appendonly is no, so a restart loses tokens and fences: "+set("appendonly yes"))
	p.expect(fsync == "always", warning, "appendfsync is always", "appendfsync is "+fsync+
		", and a crash loses tokens and fences unless it is always: "+set("appendfsync always"))
	if config["no-appendfsync-on-rewrite"] == "yes" {
		p.expect(false, warning, "", "no-appendfsync-on-rewrite is yes, and a crash during a rewrite loses tokens and fences: "+set("no-appendfsync-on-rewrite no"))
	}
	if info["aof_last_write_status"] == "err" {
		p.expect(false, bad, "", "the last write to the append-only file failed, so a restart loses tokens and fences: see its log; the disk may be full")
	}
	p.expect(info["maxmemory"] == "0" || info["maxmemory_policy"] == "noeviction", bad, "it evicts no keys", "maxmemory-policy is "+
		info["maxmemory_policy"]+", which evicts leases, tokens or fences: "+set("maxmemory-policy noeviction"))
	return nil
}

func (p *probe) postgres(ctx context.Context, addr string) error {
	c, err := openRow(ctx, addr)
	if err != nil {
		return err
	}
	defer func() { _ = c.Close() }() //nolint:contextcheck // it has a limit of its own
	var now time.Time
	var version, fsync, commit, unlogged string
	var standby, lag, endless bool
	sent := time.Now()
	if err := c.QueryRow(ctx, `SELECT clock_timestamp(), current_setting('server_version'), current_setting('fsync'), current_setting('synchronous_commit'),
		pg_is_in_recovery(), EXISTS (SELECT FROM pg_stat_replication) AND
		(current_setting('synchronous_standby_names') = '' OR current_setting('synchronous_commit') IN ('off', 'local')),
		(SELECT coalesce(string_agg(relid::text, ', '), '') FROM pg_class JOIN (SELECT to_regclass('fencelab_lock') AS relid
		UNION SELECT to_regclass('fencelab_fence') UNION SELECT relid FROM pg_partition_tree(to_regclass('fencelab_fence'))) AS t ON oid = relid WHERE relpersistence <> 'p'),
		to_regclass('fencelab_fence') IS NOT NULL AND current_setting('idle_in_transaction_session_timeout') = '0'`).
		Scan(&now, &version, &fsync, &commit, &standby, &lag, &unlogged, &endless); err != nil {
		return err
	}
	p.clock(now, sent)
	p.expect(!standby, bad, "PostgreSQL "+version+" is not a standby", "it is a standby: use the address of its primary")
	p.expect(!lag, warning, "it has no asynchronous standby", "its standbys are asynchronous, so a failover loses tokens and fences: set synchronous_standby_names")
	p.expect(fsync == "on", bad, "fsync is on", "fsync is off, so a crash loses tokens and fences: 'ALTER SYSTEM SET fsync = on', then 'SELECT pg_reload_conf()'")
	p.expect(commit != "off", bad, "synchronous_commit is "+commit,
		"synchronous_commit is off, so a crash loses tokens and fences: 'ALTER SYSTEM SET synchronous_commit = on', then 'SELECT pg_reload_conf()'")
	p.expect(unlogged == "", bad, "its tables of tokens and fences are logged, if it has any",
		unlogged+": unlogged, so a crash loses tokens and fences: 'ALTER TABLE ... SET LOGGED'")
	if endless {
		p.expect(false, warning, "", "idle_in_transaction_session_timeout is 0, so a holder that freezes in a guarded transaction blocks its key without limit: set it")
	}
	return nil
}

func (p *probe) etcd(ctx context.Context, addr string) error {
	c, err := clientv3.New(clientv3.Config{Endpoints: []string{addr}, Logger: zap.NewNop()})
	if err != nil {
		return err
	}
	defer func() { _ = c.Close() }()
	s, err := c.Status(ctx, addr)
	if err != nil {
		return err
	}
	p.expect(s.Leader != 0 && len(s.Errors) == 0, bad, "etcd "+s.Version+" at "+addr+" has a leader",
		fmt.Sprintf("etcd %s at %s has no leader or an alarm %q: 'etcdctl endpoint status', 'etcdctl alarm list'", s.Version, addr, s.Errors))
	return nil
}

func (p *probe) consul(ctx context.Context, addr string) error {
	c, err := api.NewClient(&api.Config{Address: addr})
	if err != nil {
		return err
	}
	o := (&api.QueryOptions{}).WithContext(ctx)
	leader, err := c.Status().LeaderWithQueryOptions(o)
	if err != nil {
		return err
	}
	var self struct{ Config struct{ Version string } }
	if _, err := c.Raw().Query("/v1/agent/self", &self, o); err != nil {
		self.Config.Version = "of an unknown version" // reading it takes the ACL agent:read
	}
	p.expect(leader != "", bad, "Consul "+self.Config.Version+" at "+addr+" has a leader",
		"Consul at "+addr+" has no leader: 'consul operator raft list-peers'")
	return nil
}

func (p *probe) zooKeeper(ctx context.Context, addr string) error {
	c, err := new(net.Dialer).DialContext(ctx, "tcp", addr)
	if err != nil {
		return err
	}
	defer func() { _ = c.Close() }()
	defer context.AfterFunc(ctx, func() { _ = c.Close() })()
	if _, err := io.WriteString(c, "srvr"); err != nil {
		return err
	}
	reply, err := io.ReadAll(c)
	if err != nil {
		return err
	}
	m := regexp.MustCompile(`(?s)version: ([0-9.]+).*Mode: (\w+)`).FindSubmatch(reply)
	if m == nil {
		return fmt.Errorf("it has no quorum, or srvr isn't in its 4lw.commands.whitelist: %.60q", reply)
	}
	p.expect(true, "", fmt.Sprintf("ZooKeeper %s at %s is %s", m[1], addr, m[2]), "")
	return nil
}

// s3 tries the prefix of a lock's objects first, and then a store's: the other may be forbidden.
func (p *probe) s3(ctx context.Context, o object) error {
	prefix := o.Prefix + "lock/"
	err := s3object.Probe(ctx, o.Client, o.Name, prefix)
	if r, ok := errors.AsType[*smithyhttp.ResponseError](err); ok && r.HTTPStatusCode() == http.StatusForbidden {
		prefix = o.Prefix
		err = s3object.Probe(ctx, o.Client, o.Name, prefix)
	}
	if p.expect(err == nil, bad, "s3 refuses stale tokens", fmt.Sprintf("s3: %v", err)); err != nil {
		return nil
	}
	name := prefix + "~probe-" + rand.Text()
	defer func() {
		ctx, cancel := context.WithTimeout(context.WithoutCancel(ctx), time.Second)
		defer cancel()
		_, _ = o.Client.DeleteObject(ctx, &s3.DeleteObjectInput{Bucket: &o.Name, Key: &name})
	}()
	sent := time.Now()
	if _, err := o.Client.PutObject(ctx, &s3.PutObjectInput{Bucket: &o.Name, Key: &name}); err != nil {
		return err
	}
	head, err := o.Client.HeadObject(ctx, &s3.HeadObjectInput{Bucket: &o.Name, Key: &name})
	if err != nil {
		return err
	}
	now, ok := middleware.GetServerTime(head.ResultMetadata)
	if !ok || head.LastModified == nil {
		p.expect(false, bad, "", "it sends no Date or no Last-Modified, which the leases of a lock need")
		return nil
	}
	age := now.Sub(*head.LastModified) // in seconds
	p.expect(age > -2*time.Second && age < time.Since(sent)+2*time.Second, warning, "its Date and Last-Modified agree",
		fmt.Sprintf("its Date is %v after an object's Last-Modified when that was just written: leases of a lock end early or late; run NTP on its servers", age))
	return nil
}

// refusesStale checks that a store refuses a stale token.
func refusesStale(ctx context.Context, s *stores.Store) error {
	const key = "fencelab-probe"
	rec, err := s.Read(ctx, key)
	if err != nil && !errors.Is(err, resource.ErrNotFound) {
		return err
	}
	seen := rec.MaxFence.Token
	if seen > math.MaxUint64-2 {
		return fmt.Errorf("the fence of %s is %d, so there is no newer token to try; lower it with 'fencelab fence set -force URL %[1]s 1', "+
			"or for http, with the server stopped: %[3]s", key, seen, setFence(key, 1))
	}
	token := seen + 2
	err = s.Write(ctx, key, resource.NewFence(token, 1), nil)
	if err == nil {
		token--
		err = cmp.Or(s.Write(ctx, key, resource.NewFence(token, 1), nil), errors.New("it accepted a stale token"))
	}
	if stale, refused := errors.AsType[*resource.StaleTokenError](err); refused && stale.Seen.Token >= token {
		return nil // another probe was faster
	}
	return err
}
