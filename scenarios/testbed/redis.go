package testbed

import (
	"context"
	"errors"
	"fmt"
	"net"
	"net/url"
	"os/exec"
	"regexp"
	"strconv"
	"sync"
	"time"

	"github.com/alicebob/miniredis/v2"
	"github.com/redis/go-redis/v9"
	"github.com/redis/go-redis/v9/maintnotifications"
)

var redisServer = serverType{
	name: "redis", title: "Redis", image: "redis:7.4.2-bookworm", ports: []int{6379}, data: "/data",
	program: "redis-server", apt: "redis-server", brew: "redis",
	url: "redis://%s", schemes: []string{"redis", "rediss"},
	accept: func(u *url.URL, _ bool) bool {
		_, err := redis.ParseURL(u.String())
		return err == nil
	},
	command: redisCommand,
	ready: func(ctx context.Context, _, url string, _ bool) (string, error) {
		opt, err := redis.ParseURL(url)
		if err != nil {
			return "", errors.New("not a URL of Redis") // the error may quote a password
		}
		info, err := redisInfo(ctx, opt, "Server")
		if err != nil {
			return "", err
		}
		return info["redis_version"], nil
	},
	clock: func(ctx context.Context, addr string) (time.Time, error) {
		c := oneRedis(&redis.Options{Addr: addr})
		defer func() { _ = c.Close() }()
		return c.Time(ctx).Result()
	},
	deny: func(ctx context.Context, addr string, isSo bool) error {
		replicas, says := "0", ""
		if isSo {
			replicas, says = "2147483647", "NOREPLICAS Not enough good replicas to write."
		}
		if m, ok := imitations.Load(addr); ok {
			m.(*miniredis.Miniredis).SetError(says)
			return nil
		}
		c := oneRedis(&redis.Options{Addr: addr})
		defer func() { _ = c.Close() }()
		return c.ConfigSet(ctx, "min-replicas-to-write", replicas).Err()
	},
	embedded: func() (addr, version string, stop func() error, err error) {
		m := miniredis.NewMiniRedis()
		m.ClockTTL(true) // keys expire by themselves
		if err := m.StartAddr("127.0.0.1:0"); err != nil {
			return "", "", nil, err
		}
		addr = m.Addr()
		imitations.Store(addr, m)
		return addr, "miniredis", func() error { imitations.Delete(addr); m.Close(); return nil }, nil
	},
}

var imitations sync.Map // by address

// StartRedis starts a Redis that allows DEBUG, and keeps nothing on disk unless o.Args say so. If the provider can't use o.Args,
// the error matches [errors.ErrUnsupported].
func StartRedis(ctx context.Context, o *Options) (*Server, error) {
	return startSingle(ctx, &redisServer, o)
}

// StartRedisNodes starts n independent Redis servers, redis1 to redisN, as [StartRedis] does.
func StartRedisNodes(ctx context.Context, n int, o *Options) ([]*Server, error) {
	c, err := start(ctx, &group{serverType: &redisServer, names: numbered("redis", n)}, o)
	if err != nil {
		return nil, err
	}
	return c.Servers, nil
}

// StartRedisReplica starts an asynchronous replica of primary with the same provider, named after it with "-replica", and returns
// once it is up to date. If the primary is external or embedded, the error matches [errors.ErrUnsupported].
func StartRedisReplica(ctx context.Context, primary *Server, o *Options) (*Server, error) {
	if primary.serverType != &redisServer || primary.host == nil {
		return nil, primary.serverType.cannot(primary.Provider, fmt.Errorf("testbed: no replica of %s: %w", primary, errors.ErrUnsupported))
	}
	var with Options
	if o != nil {
		with = *o
	}
	with.Provider = primary.Provider
	g := &group{serverType: &redisServer, names: []string{primary.Name + "-replica"}, join: []*Server{primary}}
	replica, err := startGroupOfOne(ctx, g, &with)
	if err != nil {
		return nil, err
	}
	if err := awaitReplica(ctx, primary, replica); err != nil {
		return nil, errors.Join(fmt.Errorf("testbed: no replica of %s: %w", primary, err), replica.Close())
	}
	return replica, nil
}

func awaitReplica(ctx context.Context, primary, replica *Server) error {
	ctx, cancel := context.WithTimeout(ctx, startTimeout)
	defer cancel()
	return poll(ctx, func(ctx context.Context) error {
		of, err := redisInfo(ctx, &redis.Options{Addr: primary.Addr}, "Replication")
		if err != nil {
			return err
		}
		has, err := redisInfo(ctx, &redis.Options{Addr: replica.Addr}, "Replication")
		if err != nil {
			return err
		}
		if link, at := has["master_link_status"], has["slave_repl_offset"]; link != "up" || at != of["master_repl_offset"] {
			return fmt.Errorf("the replica's link is %q, and it is at %s of %s", link, at, of["master_repl_offset"])
		}
		return nil
	})
}

var redisVersion = regexp.MustCompile(`v=(\d+)\.(\S+)`)

// redisCommand ignores the packager's configuration.
func redisCommand(ctx context.Context, at placement) (command, error) {
	args := []string{"redis-server"} // the program may be a link to one that checks its name
	if at.Provider == Local {
		version := exec.CommandContext(ctx, at.Path, "--version")
		version.WaitDelay = time.Second // a script may leave a process behind
		output, _ := version.Output()
		if v := redisVersion.FindSubmatch(output); v != nil && len(v[1]) == 1 && v[1][0] < '7' {
			return command{}, &MissingError{
				"Redis", "install Redis 7 or later: https://redis.io/docs/latest/operate/oss_and_stack/install/",
				fmt.Errorf("%s is of version %s.%s", at.Path, v[1], v[2]),
			}
		}
		args = append(args, "--bind", at.Listen, "--port", strconv.Itoa(at.me().Ports[0]))
	} else {
		args = append(args, "--protected-mode", "no") // or it refuses clients outside the container
	}
	args = append(args, "--dir", at.Dir, "--save", "", "--appendonly", "no", "--enable-debug-command", "yes",
		"--repl-diskless-sync-delay", "0") // don't wait for more replicas
	for _, primary := range at.Joined {
		args = append(args, "--replicaof", primary.Host, strconv.Itoa(primary.Ports[0]))
	}
	return command{Args: append(args, at.More...)}, nil
}

func redisInfo(ctx context.Context, opt *redis.Options, section string) (map[string]string, error) {
	// The client would log that it can't connect.
	conn, err := new(net.Dialer).DialContext(ctx, "tcp", opt.Addr)
	if err != nil {
		return nil, err
	}
	if err := conn.Close(); err != nil {
		return nil, err
	}
	c := oneRedis(opt)
	defer func() { _ = c.Close() }()
	info, err := c.InfoMap(ctx, section).Result()
	if err == nil && section == "Server" && info[section]["redis_version"] == "" {
		err = errors.New("INFO server names no redis_version")
	}
	return info[section], err
}

func oneRedis(opt *redis.Options) *redis.Client {
	once := *opt
	once.ContextTimeoutEnabled, once.DisableIdentity = true, true
	once.MaxRetries, once.DialerRetries, once.PoolSize = -1, 1, 1
	once.MaintNotificationsConfig = &maintnotifications.Config{Mode: maintnotifications.ModeDisabled}
	return redis.NewClient(&once)
}
