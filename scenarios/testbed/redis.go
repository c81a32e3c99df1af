package testbed

import (
	"bufio"
	"context"
	"errors"
	"fmt"
	"net"
	"strconv"
	"strings"
	"time"

	"github.com/alicebob/miniredis/v2"
	"github.com/redis/go-redis/v9"
	"github.com/redis/go-redis/v9/maintnotifications"
)

// RedisImage is the image that containers run unless FENCELAB_REDIS_IMAGE names another.
const RedisImage = "redis:7.4.2-bookworm"

var redisKind = kind{
	name: "redis", title: "Redis", env: "REDIS",
	image: RedisImage, ports: []int{6379}, data: "/data",
	timeout:  time.Minute, // a few ms is usual
	want:     "host:port or redis:// URL",
	url:      func(addr string) string { return "redis://" + addr },
	programs: []string{"redis-server"}, apt: "redis-server", brew: "redis",
	ready: func(ctx context.Context, addr string, pid int) (string, error) {
		info, err := redisInfo(ctx, &redis.Options{Addr: addr}, "server")
		if err != nil {
			return "", err
		}
		if other := info["process_id"]; pid != 0 && other != strconv.Itoa(pid) {
			return "", fmt.Errorf("%s is another server's, of process %s", addr, other) // ours is about to fail to bind
		}
		return info["redis_version"], nil
	},
	clock: func(ctx context.Context, addr string) (time.Time, error) {
		c := oneRedis(&redis.Options{Addr: addr})
		defer func() { _ = c.Close() }()
		return c.Time(ctx).Result()
	},
	external: findExternalRedis,
	embedded: func() (addr, version string, stop func() error, err error) {
		m := miniredis.NewMiniRedis()
		m.ClockTTL(true) // keys expire as time passes, not as a test says
		if err := m.StartAddr("127.0.0.1:0"); err != nil {
			return "", "", nil, err
		}
		return m.Addr(), "miniredis", func() error { m.Close(); return nil }, nil
	},
}

// StartRedis starts a Redis, or finds the external one, and returns once it answers. It keeps nothing on disk, unless
// o's Args say so, and allows DEBUG. An error says what to do about it. It matches [errors.ErrUnsupported] if the
// provider cannot start a server with o's Args.
//
// Until Close the process tears the server down when a signal ends it; see the package comment.
func StartRedis(ctx context.Context, o *Options) (*Server, error) {
	c, err := start(ctx, redisGroup("redis"), o)
	if err != nil {
		return nil, err
	}
	return c.Servers[0], nil
}

// StartRedisNodes starts n Redis servers that know nothing of each other, redis1 to redisN, as [StartRedis] does.
// External ones are listed in FENCELAB_REDIS_ADDR, separated by commas.
func StartRedisNodes(ctx context.Context, n int, o *Options) ([]*Server, error) {
	names := make([]string, n)
	for i := range names {
		names[i] = fmt.Sprintf("redis%d", i+1)
	}
	c, err := start(ctx, redisGroup(names...), o)
	if err != nil {
		return nil, err
	}
	return c.Servers, nil
}

// StartRedisReplica starts an asynchronous replica of a running server of [StartRedis], where that comes from. Its
// name is the primary's and "-replica". It returns once the replica holds all that the primary does. Its error matches
// [errors.ErrUnsupported] if the primary is external or embedded.
func StartRedisReplica(ctx context.Context, primary *Server, o *Options) (*Server, error) {
	if primary.kind != &redisKind || primary.host == nil {
		return nil, primary.kind.beyond(primary.Provider, fmt.Errorf("testbed: no replica of %s: %w", primary, errors.ErrUnsupported))
	}
	var with Options
	if o != nil {
		with = *o
	}
	with.Provider = primary.Provider
	g := redisGroup(primary.Name + "-replica")
	g.linked, g.join = true, []*Server{primary}
	g.command = func(ctx context.Context, at place) (command, error) {
		of := at.Joined[0]
		at.More = append([]string{"--replicaof", of.Host, strconv.Itoa(of.Ports[0])}, at.More...)
		return redisCommand(ctx, at)
	}
	c, err := start(ctx, g, &with)
	if err != nil {
		return nil, err
	}
	replica := c.Servers[0]
	if err := awaitReplica(ctx, primary, replica); err != nil {
		return nil, errors.Join(fmt.Errorf("testbed: no replica of %s: %w", primary, err), replica.Close())
	}
	return replica, nil
}

func awaitReplica(ctx context.Context, primary, replica *Server) error {
	ctx, cancel := context.WithTimeout(ctx, redisKind.timeout)
	defer cancel()
	return poll(ctx, func(ctx context.Context) error {
		of, err := redisInfo(ctx, &redis.Options{Addr: primary.Addr}, "replication")
		if err != nil {
			return err
		}
		has, err := redisInfo(ctx, &redis.Options{Addr: replica.Addr}, "replication")
		if err != nil {
			return err
		}
		if link := has["master_link_status"]; link != "up" {
			return fmt.Errorf("the replica's link is %q", link)
		}
		if has["slave_repl_offset"] != of["master_repl_offset"] {
			return fmt.Errorf("the replica is at %s, the primary at %s", has["slave_repl_offset"], of["master_repl_offset"])
		}
		return nil
	})
}

func redisGroup(names ...string) *group {
	return &group{kind: &redisKind, names: names, command: redisCommand}
}

// redisCommand runs a redis-server that is volatile and controllable, under any configuration of its packager.
func redisCommand(_ context.Context, at place) (command, error) {
	args := []string{"redis-server"} // decides what the program is: it may be a link to one that does several things
	if at.Provider == Local {
		args = append(args, "--bind", at.Listen, "--port", strconv.Itoa(at.me().Ports[0]))
	} else {
		// The network of a container isn't loopback, which is all that the protected mode lets in.
		args = append(args, "--protected-mode", "no")
	}
	args = append(args, "--dir", at.Dir, "--save", "", "--appendonly", "no", "--enable-debug-command", "yes",
		"--repl-diskless-sync-delay", "0") // a replica needn't wait for others to come
	return command{Args: append(args, at.More...)}, nil
}

func findExternalRedis(ctx context.Context, k *kind, set string) ([]*Server, error) {
	var found []*Server
	for url := range strings.SplitSeq(set, ",") {
		if !strings.Contains(url, "://") {
			url = "redis://" + url
		}
		opt, err := redis.ParseURL(url)
		if err != nil || opt.Network != "tcp" {
			// The error may quote the URL, and with it a password.
			return nil, fmt.Errorf("%s is neither host:port nor a redis:// or rediss:// URL", k.envAddr())
		}
		info, err := redisInfo(ctx, opt, "server")
		if err != nil {
			return nil, fmt.Errorf("the server at %s (%s) does not answer: %w", opt.Addr, k.envAddr(), err)
		}
		found = append(found, &Server{Addr: opt.Addr, URL: url, Version: info["redis_version"]})
	}
	return found, nil
}

// redisInfo asks a server for a section of INFO. It tries once.
func redisInfo(ctx context.Context, opt *redis.Options, section string) (map[string]string, error) {
	// The client prints a line for every server that it can't reach, so see first whether somebody listens.
	conn, err := new(net.Dialer).DialContext(ctx, "tcp", opt.Addr)
	if err != nil {
		return nil, err
	}
	if err := conn.Close(); err != nil {
		return nil, err
	}
	c := oneRedis(opt)
	defer func() { _ = c.Close() }()
	text, err := c.Info(ctx, section).Result()
	if err != nil {
		return nil, err
	}
	info := make(map[string]string)
	for sc := bufio.NewScanner(strings.NewReader(text)); sc.Scan(); {
		if name, value, ok := strings.Cut(sc.Text(), ":"); ok {
			info[name] = value
		}
	}
	if section == "server" && info["redis_version"] == "" {
		return nil, errors.New("INFO server names no redis_version")
	}
	return info, nil
}

// oneRedis returns a client that tries once.
func oneRedis(opt *redis.Options) *redis.Client {
	once := *opt
	once.ContextTimeoutEnabled, once.DisableIdentity = true, true
	once.MaxRetries, once.DialerRetries, once.PoolSize = -1, 1, 1
	once.MaintNotificationsConfig = &maintnotifications.Config{Mode: maintnotifications.ModeDisabled}
	return redis.NewClient(&once)
}
