package testbed

import (
	"cmp"
	"context"
	"fmt"
	"os"
)

var kinds = map[string]*kind{
	"redis": &redisKind, "etcd": &etcdKind, "zookeeper": &zooKeeperKind, "consul": &consulKind, "postgres": &postgresKind,
	"s3": &s3Kind, "dynamodb": &dynamoDBKind,
}

// Lacks returns an error, for [Need], if a provider lacks what runs a server of a kind.
func Lacks(ctx context.Context, p Provider, name string) error {
	k := kinds[name]
	if p == Local {
		_, err := k.find(k.programs[0])
		return err
	}
	engine, err := dialEngine(ctx)
	if err != nil {
		return &MissingError{"Docker engine", "docker version says why", err}
	}
	defer func() { _ = engine.Close() }()
	image := cmp.Or(os.Getenv(k.envImage()), k.image)
	if _, err := engine.Client().ImageInspect(ctx, image); err != nil {
		return &MissingError{k.title + " image", "docker pull " + image + ", or sudo make images", fmt.Errorf("%s: %w", image, err)}
	}
	return nil
}
